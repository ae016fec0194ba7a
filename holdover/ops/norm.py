"""Root-mean-square norms."""

import ctypes

import torch
import torch.nn.functional as F

from holdover.ops import native

PARALLEL_FROM = 1 << 15  # numbers: fewer are not worth waking a second thread


def threads_for(numbers: int) -> int:
    """Threads for a pass over so many numbers."""
    return torch.get_num_threads() if numbers >= PARALLEL_FROM else 1


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension. x: [tokens, dim]; weight: float32 [dim]. Returns x's dtype.

    With `delta`, like x, it is first added to x in place: a layer's output to the residual stream.
    """
    library = native.library() if x.device.type == "cpu" and x.is_contiguous() else None
    if library is None:
        if delta is not None:
            x += delta
        return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
    assert delta is None or (delta.is_contiguous() and delta.shape == x.shape and delta.dtype == x.dtype)
    out = torch.empty_like(x)
    dim = x.shape[-1]
    library.holdover_rms_norm(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(None if delta is None else delta.data_ptr()),
        ctypes.c_void_p(weight.data_ptr()), ctypes.c_float(eps), ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(x.numel() // dim), dim, int(x.dtype == torch.bfloat16), threads_for(x.numel()),
    )  # fmt: skip
    return out

"""Short causal convolutions, one filter per channel, over a batch of unlike sequences."""

import ctypes

import torch
import torch.nn.functional as F

from holdover.ops import native
from holdover.ops.norm import threads_for
from holdover.ops.sequences import LiveSequences


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tail: torch.Tensor,
    sequences: LiveSequences,
    *,
    silu: bool,
) -> torch.Tensor:
    """Each token's weighted sum of its own and the last `kernel - 1` inputs; updates the tails in place.

    x: [tokens, channels], rows may be strided. weight: float32 [kernel, channels], the newest input's last; bias:
    float32 [channels]. tail: view [max_running, kernel - 1, channels] of live states, in x's dtype: the last inputs.
    silu: whether the sum goes through it. Returns float32 [tokens, channels]; zero for tokens of no sequence.
    """
    kernel, channels = weight.shape
    out = torch.zeros(len(x), channels, dtype=torch.float32, device=x.device)
    library = native.library() if x.device.type == "cpu" else None
    if library is None:
        for first, last, row in sequences.parts():
            inputs = torch.cat([tail[row], x[first:last]])
            tail[row] = inputs[len(inputs) - (kernel - 1) :]
            sums = (inputs.float().unfold(0, kernel, 1) * weight.t()).sum(-1)
            sums = sums if bias is None else sums + bias
            out[first:last] = F.silu(sums) if silu else sums
        return out
    assert x.dtype in (torch.float32, torch.bfloat16) and tail.dtype == x.dtype and x.stride(1) == 1
    pointer, long, live = ctypes.c_void_p, ctypes.c_int64, sequences.live
    status = library.holdover_causal_conv(
        pointer(x.data_ptr()), long(x.stride(0)), pointer(weight.data_ptr()),
        pointer(None if bias is None else bias.data_ptr()), pointer(live.data_ptr()), long(live.stride(0)),
        long(tail.data_ptr() - live.data_ptr()), pointer(sequences.live_rows.data_ptr()),
        pointer(sequences.starts.data_ptr()), len(sequences.live_rows), long(channels), kernel, int(silu),
        pointer(out.data_ptr()), int(x.dtype == torch.bfloat16), threads_for(out.numel()),
    )  # fmt: skip
    if status != 0:
        raise ValueError(f"a convolution over {kernel} tokens is longer than the kernel was built for")
    return out

"""Products with weights, kept in the form that the machine multiplies fastest."""

import ctypes

import torch
import torch.nn.functional as F

from holdover.ops import native
from holdover.ops.norm import PARALLEL_FROM
from holdover.ops.shapes import padded_length, pads_shapes


def _packs(weight: torch.Tensor) -> bool:
    return native.has_matrix_unit(weight) and weight.shape[-1] % 32 == 0


def _pack(weight: torch.Tensor) -> torch.Tensor:
    library = native.library()
    assert library is not None
    n, k = weight.shape
    packed = torch.empty(-(-n // 32) * 32 * k, dtype=torch.bfloat16)
    weight = weight.contiguous()
    library.holdover_pack(
        ctypes.c_void_p(weight.data_ptr()), ctypes.c_void_p(packed.data_ptr()), ctypes.c_int64(n), ctypes.c_int64(k)
    )
    return packed


def _products(
    x: torch.Tensor, packed: torch.Tensor, starts: list[int], out: torch.Tensor, out_features: int, in_features: int
) -> None:
    library = native.library()
    assert library is not None and x.stride(-1) == 1 and out.stride(-1) == 1
    work = x.shape[0] * in_features * out_features
    status = library.holdover_products(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.stride(0)), ctypes.c_void_p(packed.data_ptr()),
        (ctypes.c_int64 * len(starts))(*starts), len(starts) - 1, ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(out.stride(0)), ctypes.c_int64(out_features), ctypes.c_int64(in_features),
        torch.get_num_threads() if work > PARALLEL_FROM * 8 else 1,
    )  # fmt: skip
    if status != 0:
        raise MemoryError(f"a product of {tuple(x.shape)} by {(in_features, out_features)} failed (status {status})")


class Linear:
    """y = x W^T. weight: [out_features, in_features]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = _pack(weight) if _packs(weight) else None
        self._weight = weight.contiguous() if self._packed is None else None

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [tokens, in_features], rows may lie apart. Returns [tokens, out_features], in `out` if given."""
        if self._packed is not None:
            out = torch.empty(len(x), self.out_features, dtype=x.dtype) if out is None else out
            _products(x, self._packed, [0, len(x)], out, self.out_features, self.in_features)
            return out
        assert self._weight is not None
        y = F.linear(x, self._weight)
        return y if out is None else out.copy_(y)


class ExpertLinear:
    """Each group of rows by its own weight. weights: [experts, out_features, in_features]."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.num_experts, self.out_features, self.in_features = weights.shape
        packs = _packs(weights)
        self._packed = torch.cat([_pack(weight) for weight in weights]) if packs else None
        self._weights = None if packs else weights.transpose(1, 2).contiguous()

    def rooms(self, counts: list[int]) -> list[int]:
        """Rows to set aside for each expert that has so many: more where products gain from round sizes."""
        if self._weights is None or not pads_shapes(self._weights):
            return counts
        return [padded_length(count) if count else 0 for count in counts]

    def __call__(self, rows: torch.Tensor, starts: list[int]) -> torch.Tensor:
        """rows: [n, in_features], expert e's are `[starts[e], starts[e + 1])`. Returns [n, out_features]."""
        out = torch.empty(len(rows), self.out_features, dtype=rows.dtype, device=rows.device)
        if self._packed is not None:
            _products(rows, self._packed, starts, out, self.out_features, self.in_features)
            return out
        assert self._weights is not None
        for expert, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            if last > first:
                torch.mm(rows[first:last], self._weights[expert], out=out[first:last])
        return out

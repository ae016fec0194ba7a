"""Products with weights, kept in the form that the machine multiplies fastest."""

import ctypes

import torch
import torch.nn.functional as F

from holdover.ops import native
from holdover.ops.norm import PARALLEL_FROM
from holdover.ops.shapes import widens

WIDE_FROM = 8  # rows: fewer are not worth widening a weight for


def packs(weight: torch.Tensor) -> bool:
    """Whether weights like this one, [..., out_features, in_features], are kept packed for the matrix unit."""
    return native.has_matrix_unit(weight) and weight.shape[-1] % 32 == 0


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out_features, in_features] in the order that the matrix unit reads: see ops/native/matrix.c."""
    library = native.library()
    assert library is not None
    n, k = weight.shape
    packed = torch.empty(-(-n // 32) * 32 * k, dtype=torch.bfloat16)
    weight = weight.contiguous()
    library.holdover_pack(
        ctypes.c_void_p(weight.data_ptr()), ctypes.c_void_p(packed.data_ptr()), ctypes.c_int64(n), ctypes.c_int64(k)
    )
    return packed


def product_threads(multiplications: int) -> int:
    """Threads for a product of so many multiplications."""
    return torch.get_num_threads() if multiplications > PARALLEL_FROM * 8 else 1


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T. x: [rows, in_features]; weight: [out_features, in_features]."""
    if len(x) >= WIDE_FROM and widens(x):
        return F.linear(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)


class HeadLinear:
    """Each head by a weight of its own. weights: [heads, out_features, in_features]."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.heads, self.out_features, self.in_features = weights.shape
        self._packed = torch.cat([pack(each) for each in weights]) if packs(weights) else None
        self._weights = weights.contiguous() if self._packed is None else None

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: [tokens, heads, in_features]; out: [tokens, heads, out_features]. Rows and heads of both may lie apart."""
        if self._packed is None:
            assert self._weights is not None
            for head, weight in enumerate(self._weights):
                out[:, head] = product(x[:, head], weight)
            return
        library = native.library()
        assert library is not None and x.stride(2) == 1 and out.stride(2) == 1
        long = ctypes.c_int64
        status = library.holdover_products(
            ctypes.c_void_p(x.data_ptr()), long(x.stride(0)), long(x.stride(1)),
            ctypes.c_void_p(self._packed.data_ptr()), long(len(x)), self.heads, ctypes.c_void_p(out.data_ptr()),
            long(out.stride(0)), long(out.stride(1)), long(self.out_features), long(self.in_features),
            product_threads(len(x) * self.heads * self.in_features * self.out_features),
        )  # fmt: skip
        if status != 0:
            shape = (self.heads, self.in_features, self.out_features)
            raise MemoryError(f"a product of {tuple(x.shape)} by {shape} failed (status {status})")


class Linear:
    """y = x W^T. weight: [out_features, in_features]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = HeadLinear(weight[None]) if packs(weight) else None
        self._weight = weight.contiguous() if self._packed is None else None

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [tokens, in_features], rows may lie apart. Returns [tokens, out_features], in `out` if given."""
        if self._packed is not None:
            out = torch.empty(len(x), self.out_features, dtype=x.dtype) if out is None else out
            self._packed(x[:, None], out[:, None])
            return out
        assert self._weight is not None
        y = product(x, self._weight)
        return y if out is None else out.copy_(y)

"""Shapes that matrix products are padded to.

Without a matrix unit of our own (see ops/linear.py), bfloat16 products on the CPU are compiled for each shape that is
new to the process, at almost a millisecond each, many times what a small product takes. Batches of agents' turns have
ever new shapes; so sizes are rounded up to one of a few. See docs/design/cpu-kernels.md for the measurement.
"""

from functools import lru_cache

import torch

from holdover.ops import native

FINE_STEP, FINE_LIMIT, COARSE_STEP = 16, 128, 64


@lru_cache(maxsize=1)
def _multiplies_bfloat16() -> bool:
    """Whether PyTorch has fast bfloat16 products for this processor. With AVX2 alone they run at a hundredth of the
    speed of float32, or a tenth where the weight is [out_features, in_features]."""
    return torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "AMX", "SVE"))


def widens(x: torch.Tensor) -> bool:
    """Whether products of many rows with this tensor are made in float32, as the processor is slow at bfloat16."""
    plain = x.device.type == "cpu" and x.dtype == torch.bfloat16
    return plain and not _multiplies_bfloat16() and not native.has_matrix_unit(x)


def pads_shapes(x: torch.Tensor) -> bool:
    """Whether products with this tensor gain from padding."""
    plain = x.device.type == "cpu" and x.dtype == torch.bfloat16
    return plain and _multiplies_bfloat16() and not native.has_matrix_unit(x)


def padded_length(length: int) -> int:
    """The size that `length` rows are padded to."""
    step = FINE_STEP if length <= FINE_LIMIT else COARSE_STEP
    return -(-length // step) * step

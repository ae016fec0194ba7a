"""Shapes that matrix products are padded to.

Without a matrix unit of our own (see ops/linear.py), bfloat16 products on the CPU are compiled for each shape that is
new to the process, at almost a millisecond each, many times what a small product takes. Batches of agents' turns have
ever new shapes; so sizes are rounded up to one of a few. See docs/design/cpu-kernels.md for the measurement.
"""

import torch

from holdover.ops import native

FINE_STEP, FINE_LIMIT, COARSE_STEP = 16, 128, 64


def pads_shapes(x: torch.Tensor) -> bool:
    """Whether products with this tensor gain from padding."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and not native.has_matrix_unit(x)


def padded_length(length: int) -> int:
    """The size that `length` rows are padded to."""
    step = FINE_STEP if length <= FINE_LIMIT else COARSE_STEP
    return -(-length // step) * step

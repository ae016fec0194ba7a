"""Which tokens of a batch belong to which sequence, for operations that carry a state from token to token."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LiveSequences:
    """Which tokens of a flat batch belong to whom, and where each sequence's state lies.

    starts: int64 [sequences + 1], on the CPU; live_rows: int64 [sequences], on the CPU.
    live: uint8 [max_running, live_bytes]; the states are views of it.
    """

    starts: torch.Tensor
    live_rows: torch.Tensor
    live: torch.Tensor

    def parts(self) -> list[tuple[int, int, int]]:
        """Of each sequence: its tokens `[first, last)` of the batch, and its live row."""
        starts = self.starts.tolist()
        return list(zip(starts[:-1], starts[1:], self.live_rows.tolist(), strict=True))

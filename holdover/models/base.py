"""What every model is to the engine: a layout, a forward pass over a batch of unlike sequences, and logits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from holdover.ops.sequences import LiveSequences
from holdover.state.layout import Layout
from holdover.state.pool import DevicePool


@dataclass(frozen=True, slots=True)
class BatchSequence:
    """One sequence's part of a batch.

    table: int64 [position + tokens], the slots of all its tokens, the new ones last. live_row: its live state.
    window: int64 [keys, slots_per_window_row], the slots of the window rows of its last tokens, the new ones last; as
    many of the older ones as any token reads. None for models without sliding windows.
    """

    table: torch.Tensor
    num_new: int
    live_row: int
    window: torch.Tensor | None = None


@dataclass(slots=True)
class Batch:
    """The tokens of one step. slots: int64 [num_tokens], where their rows go.

    token_ids, positions: int64 [num_tokens or more]; what follows the batch's own tokens is padding, which belongs to
    no sequence: it goes through the layers that treat tokens apart, and touches no state.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sequences: Sequence[BatchSequence]
    starts: torch.Tensor = field(init=False)
    bounds: list[tuple[int, int]] = field(init=False)
    num_tokens: int = field(init=False)
    live_rows: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        edges = [0]
        for sequence in self.sequences:
            edges.append(edges[-1] + sequence.num_new)
        self.num_tokens = edges[-1]
        self.bounds = list(zip(edges[:-1], edges[1:], strict=True))
        self.starts = torch.tensor(edges, dtype=torch.int64)
        self.live_rows = torch.tensor([sequence.live_row for sequence in self.sequences], dtype=torch.int64)

    def live_sequences(self, pool: DevicePool) -> LiveSequences:
        return LiveSequences(self.starts, self.live_rows, pool.live)


class Model(Protocol):
    """A causal language model with weights, on one device."""

    layout: Layout
    vocab_size: int
    context_length: int
    fingerprint: str
    eos_token_ids: frozenset[int]
    device: torch.device

    def forward(self, batch: Batch, pool: DevicePool) -> torch.Tensor:
        """Feed a batch, writing rows and live states. Returns normed hidden vectors, [tokens, hidden_size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token. hidden: [n, hidden_size]; returns float32 [n, vocab_size]."""

"""What a tier is: a place that keeps segments under a hard byte budget."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch


class PutStatus(Enum):
    """What became of a segment that was offered to a tier."""

    KEPT = "kept"
    ALREADY_THERE = "already there"
    REFUSED = "refused"  # it fits only by passing the budget or by evicting what is leased


@dataclass(frozen=True, slots=True)
class PutResult:
    """Outcome of a `put`; `evicted` names what had to go for it."""

    status: PutStatus
    evicted: tuple[str, ...] = ()


class Tier(Protocol):
    """Keeps segments by name. All calls are safe from any thread. I/O faults are raised as TierError."""

    name: str
    budget_bytes: int
    immediate: bool  # whether `get` only takes as long as a copy in memory

    def has(self, name: str) -> bool:
        """Whether the segment can be got now."""

    def get(self, name: str) -> AbstractContextManager[torch.Tensor | None]:
        """The segment's bytes (uint8), or None. It is leased, so not evicted, until the context ends."""

    def put(self, name: str, nbytes: int, make: Callable[[], torch.Tensor]) -> PutResult:
        """Keep the segment that `make` returns (uint8 [nbytes]). Room is made before `make` is called."""

    def delete(self, name: str) -> None:
        """Forget a segment; no error if it is not there."""

    def scan(self) -> Iterator[str]:
        """Names of all segments kept."""

    def touch(self, names: list[str]) -> None:
        """These were used, the last one most recently; what was used least recently is evicted first."""

    def used_bytes(self) -> int:
        """Bytes that count against the budget."""

"""What a tier is: a place that keeps segments under a hard byte budget."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from holdover.state.segment import Link

ALONE = Link("", None, "")  # goes on from nothing


class PutStatus(Enum):
    """What became of a segment that was offered to a tier."""

    KEPT = "kept"
    ALREADY_THERE = "already there"
    REFUSED = "refused"  # it fits only by passing the budget or by evicting what is leased
    ORPHAN = "its parent is not there"  # nobody who looks for it, prefix by prefix, could come so far


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
    claims: bool  # whether engines can leave notes for each other here
    shared: bool  # whether other engines may keep segments here too: it takes only what continues a chain from its root

    @property
    def opened(self) -> bool:
        """Whether the books are complete. Until then, saving waits; what is asked for by name is found all the same."""

    def has(self, name: str) -> bool:
        """Whether the segment can be got now."""

    def get(self, name: str) -> AbstractContextManager[torch.Tensor | None]:
        """The segment's bytes (uint8), or None. It is leased, so not evicted, until the context ends."""

    def put(self, name: str, nbytes: int, make: Callable[[], torch.Tensor], link: Link = ALONE) -> PutResult:
        """Keep the segment that `make` returns (uint8 [nbytes]). Room is made before `make` is called.

        The segment that this one goes on from is not evicted while this one is here.
        """

    def head(self, name: str, nbytes: int, parent: str | None) -> bytes | None:
        """The first bytes of a segment, or None if it is not there. Asks the place itself, not only the books."""

    def heads(self, names: Iterable[str], nbytes: int) -> dict[str, bytes]:
        """The first bytes of those segments that the books have, read all at once, where reading one after another
        would take long; else none. Raises TierError."""

    def adopt(self, name: str, nbytes: int, link: Link) -> bool:
        """Enter a segment that was found in the books. False if they have no room for it."""

    def claim(self, name: str, content: bytes) -> bytes | None:
        """Leave a note for others that the segment `name` is being computed. What there is already, if there is."""

    def claimed(self, name: str) -> bytes | None:
        """The note that was left of a segment, if there is one."""

    def unclaim(self, name: str) -> None:
        """Take a note away, whoever left it."""

    def delete(self, name: str, parent: str | None = None) -> None:
        """Forget a segment, and what goes on from it; no error if it is not there. parent: in case that the books don't
        have it."""

    def scan(self) -> Iterator[str]:
        """Names of all segments kept."""

    def touch(self, names: list[str]) -> None:
        """These were used, the last one most recently. Evicted is what no other segment goes on from, and of that what
        was used least recently."""

    def used_bytes(self) -> int:
        """Bytes that count against the budget."""

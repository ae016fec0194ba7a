"""Counting, not inferring: how often each prefix position lies in each tier, and which bytes were new to it."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from holdover.state.address import Tokens
from holdover.state.node import Saved
from holdover.state.segment import Kind

WINDOW_SALT = 0x5851F42D4C957F2D  # a position's window row is another thing than its row
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


_powers: NDArray[np.uint64] = np.ones(1, dtype=np.uint64)


def position_digests(tokens: Tokens, first: int = 0) -> list[int]:
    """A 64-bit digest of the prefix that ends at each token from `first` on, however it is cut into segments."""
    global _powers
    with np.errstate(over="ignore"):
        if len(_powers) <= len(tokens):
            _powers = np.cumprod(np.full(2 * len(tokens) + 2, MULTIPLIER, dtype=np.uint64), dtype=np.uint64)
        mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        mixed *= _powers[: len(tokens)]
        digests: list[int] = np.cumsum(mixed, dtype=np.uint64)[first:].tolist()
    return digests


@dataclass(slots=True)
class TierAudit:
    """One tier's books: copies of each prefix position, and of each snapshot position, at this moment."""

    copies: Counter[int] = field(default_factory=Counter)
    held: dict[str, list[int]] = field(default_factory=dict)
    max_copies: int = 0

    def added(self, saved: Saved, tokens: Tokens, space: bytes) -> int:
        """A segment was put into the tier; returns how many positions of it the tier did not hold before.

        tokens: from position 0, at least as far as the segment's end. space: whose they are; the same tokens of two
        tenants are two prefixes.
        """
        prefix, salt = tokens[: saved.end], int.from_bytes(space[:8], "little")
        if saved.kind is Kind.SNAPSHOT:
            return self._count(saved.name, [~position_digests(prefix, saved.end - 1)[-1] ^ salt], count_copies=False)
        salt ^= WINDOW_SALT if saved.kind is Kind.WINDOW else 0
        digests = [digest ^ salt for digest in position_digests(prefix, saved.start)]
        return self._count(saved.name, digests, count_copies=True)

    def _count(self, name: str, digests: list[int], count_copies: bool) -> int:
        new = 0
        self.held[name] = digests
        for digest in digests:
            self.copies[digest] += 1
            new += self.copies[digest] == 1
            if count_copies:
                self.max_copies = max(self.max_copies, self.copies[digest])
        return new

    def removed(self, name: str) -> None:
        """A segment is gone from the tier."""
        for digest in self.held.pop(name, ()):
            self.copies[digest] -= 1
            if not self.copies[digest]:
                del self.copies[digest]

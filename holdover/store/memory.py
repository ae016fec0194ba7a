"""The memory tier: segments in host RAM."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from holdover.state.segment import Link
from holdover.store.ledger import Ledger
from holdover.store.tier import ALONE, PutResult, PutStatus

ENTRY_OVERHEAD_BYTES = 768  # of the tensor object, its name and its place in the books


class MemoryTier:
    """Keeps each segment as one buffer, exactly as it would lie on disk."""

    immediate = True
    shared = False
    claims = False
    opened = True

    def __init__(self, budget_bytes: int, name: str = "memory") -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self._buffers: dict[str, torch.Tensor] = {}
        self._ledger = Ledger(budget_bytes, self._drop)

    def _drop(self, name: str) -> None:
        self._buffers.pop(name, None)

    def has(self, name: str) -> bool:
        return self._ledger.has(name)

    @contextmanager
    def get(self, name: str) -> Iterator[torch.Tensor | None]:
        if not self._ledger.lease(name):
            yield None
            return
        try:
            yield self._buffers[name]
        finally:
            self._ledger.release(name)

    def put(self, name: str, nbytes: int, make: Callable[[], torch.Tensor], link: Link = ALONE) -> PutResult:
        result = self._ledger.reserve(name, nbytes + ENTRY_OVERHEAD_BYTES, link)
        if result.status is not PutStatus.KEPT:
            return result
        try:
            self._buffers[name] = make()
        except BaseException:
            self._ledger.abandon(name)
            raise
        self._ledger.complete(name)
        return result

    def head(self, name: str, nbytes: int, parent: str | None) -> bytes | None:
        with self.get(name) as buffer:
            return None if buffer is None else buffer[:nbytes].numpy().tobytes()

    def heads(self, names: Iterable[str], nbytes: int) -> dict[str, bytes]:
        return {}

    def adopt(self, name: str, nbytes: int, link: Link) -> bool:
        return self._ledger.has(name)

    def delete(self, name: str, parent: str | None = None) -> None:
        self._ledger.remove(name)

    def claim(self, name: str, content: bytes) -> bytes | None:
        return None

    def claimed(self, name: str) -> bytes | None:
        return None

    def unclaim(self, name: str) -> None:
        """Nobody else is here."""

    def scan(self) -> Iterator[str]:
        return self._ledger.names()

    def touch(self, names: list[str]) -> None:
        self._ledger.touch(names)

    def used_bytes(self) -> int:
        return self._ledger.used_bytes

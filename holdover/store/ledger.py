"""The books of a tier: what it keeps, how many bytes, in which order of use. The budget holds at every moment."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from holdover.store.tier import PutResult, PutStatus


@dataclass(slots=True)
class Entry:
    """A segment in the books. `complete` once it can be read; leases: readers at this moment; doomed: removed, and kept
    only until they have done."""

    nbytes: int
    complete: bool
    leases: int = 0
    doomed: bool = False

    @property
    def readable(self) -> bool:
        return self.complete and not self.doomed


class Ledger:
    """Least recently used first. Room is reserved before bytes are made, so that the budget is never passed.

    `drop` removes an evicted segment's bytes; it is called under the lock, so that nobody is given their room before.
    """

    def __init__(self, budget_bytes: int, drop: Callable[[str], None]) -> None:
        self.budget_bytes = budget_bytes
        self._drop = drop
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._used = 0

    def reserve(self, name: str, nbytes: int) -> PutResult:
        """Enter `name` as incomplete, evicting for it."""
        with self._lock:
            if name in self._entries:
                doomed = self._entries[name].doomed
                return PutResult(PutStatus.REFUSED if doomed else PutStatus.ALREADY_THERE)
            evicted: list[str] = []
            room = self.budget_bytes - self._used
            for other, entry in self._entries.items():
                if room >= nbytes:
                    break
                if entry.complete and not entry.leases:
                    evicted.append(other)
                    room += entry.nbytes
            if room < nbytes:
                return PutResult(PutStatus.REFUSED)
            for other in evicted:
                self._used -= self._entries.pop(other).nbytes
                self._drop(other)
            self._entries[name] = Entry(nbytes, complete=False)
            self._used += nbytes
            return PutResult(PutStatus.KEPT, tuple(evicted))

    def complete(self, name: str) -> None:
        with self._lock:
            self._entries[name].complete = True

    def adopt(self, name: str, nbytes: int) -> bool:
        """Enter something that is there already (at start-up). False if the budget has no room for it."""
        with self._lock:
            if self._used + nbytes > self.budget_bytes:
                return False
            self._entries[name] = Entry(nbytes, complete=True)
            self._used += nbytes
            return True

    def remove(self, name: str) -> bool:
        """Strike `name`; False if it was not there, or is being written. Who is reading it can read on to the end."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or not entry.readable:
                return False
            entry.doomed = True
            self._drop_doomed(name)
            return True

    def _drop_doomed(self, name: str) -> None:
        entry = self._entries[name]
        if entry.doomed and not entry.leases:
            del self._entries[name]
            self._used -= entry.nbytes
            self._drop(name)

    def abandon(self, name: str) -> None:
        """What was reserved could not be written."""
        with self._lock:
            self._used -= self._entries.pop(name).nbytes

    def lease(self, name: str) -> bool:
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or not entry.readable:
                return False
            entry.leases += 1
            self._entries.move_to_end(name)
            return True

    def release(self, name: str) -> None:
        with self._lock:
            self._entries[name].leases -= 1
            self._drop_doomed(name)

    def touch(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                if name in self._entries:
                    self._entries.move_to_end(name)

    def has(self, name: str) -> bool:
        with self._lock:
            entry = self._entries.get(name)
            return entry is not None and entry.readable

    def names(self) -> Iterator[str]:
        with self._lock:
            return iter([name for name, entry in self._entries.items() if entry.readable])

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used

"""The books of a tier: what it keeps, how many bytes, in which order of use. The budget holds at every moment."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from holdover.errors import TierError
from holdover.store.tier import PutResult, PutStatus

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Entry:
    """A segment in the books. `complete` once it can be read; leases: readers at this moment; doomed: removed, but its
    bytes are still there; dropping: somebody is removing them just now."""

    nbytes: int
    complete: bool
    leases: int = 0
    doomed: bool = False
    dropping: bool = False

    @property
    def readable(self) -> bool:
        return self.complete and not self.doomed


class Ledger:
    """Least recently used first. Room is reserved before bytes are made, so that the budget is never passed.

    `drop` removes a segment's bytes, and may take its time: it is called without the lock, so that nobody who only asks
    the books waits for it. Until it is done, the bytes count. Where it raises, they count on, and are dropped when next
    room is needed or the segment is removed again.
    """

    def __init__(self, budget_bytes: int, drop: Callable[[str], None]) -> None:
        self.budget_bytes = budget_bytes
        self._drop = drop
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._used = 0

    def reserve(self, name: str, nbytes: int) -> PutResult:
        """Enter `name` as incomplete, evicting for it. Raises what `drop` raises, naming all that was evicted."""
        evicted: list[str] = []
        while True:
            with self._lock:
                if name in self._entries:
                    doomed = self._entries[name].doomed
                    return PutResult(PutStatus.REFUSED if doomed else PutStatus.ALREADY_THERE, tuple(evicted))
                room = self.budget_bytes - self._used
                if room >= nbytes:
                    self._entries[name] = Entry(nbytes, complete=False)
                    self._used += nbytes
                    return PutResult(PutStatus.KEPT, tuple(evicted))
                victims = self._victims(nbytes - room)
                if not victims:
                    return PutResult(PutStatus.REFUSED, tuple(evicted))
                evicted += [other for other in victims if not self._entries[other].doomed]
                for other in victims:
                    self._entries[other].doomed = self._entries[other].dropping = True
            failure: TierError | None = None
            for other in victims:
                try:
                    self._drop_doomed(other)
                except TierError as error:
                    failure = error
            if failure is not None:
                failure.evicted = tuple(evicted)
                raise failure

    def _victims(self, nbytes: int) -> list[str]:
        """What can go to make so much room, the least recently used first; nothing if it is not enough."""
        victims = []
        for name, entry in self._entries.items():
            if entry.complete and not entry.leases and not entry.dropping:
                victims.append(name)
                nbytes -= entry.nbytes
                if nbytes <= 0:
                    return victims
        return []

    def _drop_doomed(self, name: str) -> None:
        try:
            self._drop(name)
        except BaseException:
            with self._lock:
                self._entries[name].dropping = False
            raise
        with self._lock:
            self._used -= self._entries.pop(name).nbytes

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
        """Strike `name`; False if it was not there, or is being written. Who is reading it can read on to the end.

        Raises TierError if its bytes can't be removed; it can't be found all the same.
        """
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or not entry.complete or entry.dropping:
                return False
            entry.doomed = True
            if entry.leases:
                return True
            entry.dropping = True
        self._drop_doomed(name)
        return True

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
            entry = self._entries[name]
            entry.leases -= 1
            if entry.leases or not entry.doomed:
                return
            entry.dropping = True
        try:
            self._drop_doomed(name)
        except TierError as error:  # who has read it has what it wanted
            log.warning("%s was removed while it was read, and is still there: %s", name, error)

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

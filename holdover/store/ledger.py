"""The books of a tier: what it keeps, how many bytes, in which order of use. The budget holds at every moment."""

import heapq
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from holdover.errors import TierError
from holdover.store.tier import PutResult, PutStatus

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Entry:
    """A segment in the books. `complete` once it can be read; leases: readers at this moment; doomed: removed, but its
    bytes are still there; dropping: somebody is removing them just now; queued: it stands in the order of eviction."""

    nbytes: int
    complete: bool
    parent: str | None
    last_used: int
    leases: int = 0
    doomed: bool = False
    dropping: bool = False
    queued: bool = False

    @property
    def readable(self) -> bool:
        return self.complete and not self.doomed


class Ledger:
    """Leaf first, and of the leaves the least recently used. A leaf is what no other segment here has as its parent.
    Room is reserved before bytes are made, so that the budget is never passed.

    `drop` removes a segment's bytes, and may take its time: it is called without the lock, so that nobody who only asks
    the books waits for it. Until it is done, the bytes count. Where it raises, they count on, and are dropped when next
    room is needed or the segment is removed again.
    """

    def __init__(self, budget_bytes: int, drop: Callable[[str], None]) -> None:
        self.budget_bytes = budget_bytes
        self._drop = drop
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._children: Counter[str] = Counter()  # of those that are not doomed
        self._order: list[tuple[int, str]] = []  # a heap; an entry that was used since is put back when its turn comes
        self._used = 0
        self._uses = 0

    def reserve(self, name: str, nbytes: int, parent: str | None = None) -> PutResult:
        """Enter `name` as incomplete, evicting for it. Raises what `drop` raises, naming all that was evicted."""
        evicted: list[str] = []
        while True:
            with self._lock:
                if name in self._entries:
                    doomed = self._entries[name].doomed
                    return PutResult(PutStatus.REFUSED if doomed else PutStatus.ALREADY_THERE, tuple(evicted))
                room = self.budget_bytes - self._used
                if room >= nbytes:
                    self._enter(name, nbytes, parent, complete=False)
                    return PutResult(PutStatus.KEPT, tuple(evicted))
                victims = self._victims(nbytes - room)
                if not victims:
                    return PutResult(PutStatus.REFUSED, tuple(evicted))
                evicted += [other for other in victims if not self._entries[other].doomed]
                for other in victims:
                    self._doom(other)
                    self._entries[other].dropping = True
            failure: TierError | None = None
            for other in victims:
                try:
                    self._drop_doomed(other)
                except TierError as error:
                    failure = error
            if failure is not None:
                failure.evicted = tuple(evicted)
                raise failure

    def _enter(self, name: str, nbytes: int, parent: str | None, complete: bool) -> None:
        self._uses += 1
        self._entries[name] = Entry(nbytes, complete, parent, self._uses)
        self._used += nbytes
        if parent is not None:
            self._children[parent] += 1
        self._queue(name)

    def _queue(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is not None and not entry.queued:
            entry.queued = True
            heapq.heappush(self._order, (entry.last_used, name))

    def _victims(self, nbytes: int) -> list[str]:
        """What can go to make so much room, in order; nothing if it is not enough."""
        victims: list[str] = []
        gone: Counter[str] = Counter()
        aside: list[str] = []
        while nbytes > 0 and self._order:
            last_used, name = heapq.heappop(self._order)
            entry = self._entries.get(name)
            if entry is None:
                continue
            entry.queued = False
            if self._children[name] > gone[name]:
                continue  # it is queued again when the last of its children goes
            if entry.last_used != last_used:
                self._queue(name)
            elif not entry.complete or entry.leases or entry.dropping:
                aside.append(name)
            else:
                victims.append(name)
                nbytes -= entry.nbytes
                if entry.parent is not None and not entry.doomed:
                    gone[entry.parent] += 1
                    if gone[entry.parent] == self._children[entry.parent]:
                        self._queue(entry.parent)
        for name in aside if nbytes <= 0 else [*aside, *victims]:
            self._queue(name)
        return victims if nbytes <= 0 else []

    def _doom(self, name: str) -> None:
        """It can't be found from now on, and keeps its parent no longer."""
        entry = self._entries[name]
        if entry.doomed:
            return
        entry.doomed = True
        if entry.parent is not None:
            self._children[entry.parent] -= 1
            if not self._children[entry.parent]:
                del self._children[entry.parent]
                self._queue(entry.parent)

    def _drop_doomed(self, name: str) -> None:
        try:
            self._drop(name)
        except BaseException:
            with self._lock:
                self._entries[name].dropping = False
                self._queue(name)
            raise
        with self._lock:
            self._used -= self._entries.pop(name).nbytes

    def complete(self, name: str) -> None:
        with self._lock:
            self._entries[name].complete = True

    def adopt(self, name: str, nbytes: int, parent: str | None = None) -> bool:
        """Enter something that is there already. False if the budget has no room for it, or it is being removed."""
        with self._lock:
            if name in self._entries:
                return self._entries[name].readable
            if self._used + nbytes > self.budget_bytes:
                return False
            self._enter(name, nbytes, parent, complete=True)
            return True

    def remove(self, name: str) -> bool:
        """Strike `name`; False if it was not there, or is being written. Who is reading it can read on to the end.

        Raises TierError if its bytes can't be removed; it can't be found all the same.
        """
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or not entry.complete or entry.dropping:
                return False
            self._doom(name)
            if entry.leases:
                return True
            entry.dropping = True
        self._drop_doomed(name)
        return True

    def abandon(self, name: str) -> None:
        """What was reserved could not be written."""
        with self._lock:
            self._doom(name)
            self._used -= self._entries.pop(name).nbytes

    def lease(self, name: str) -> bool:
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or not entry.readable:
                return False
            entry.leases += 1
            self._uses += 1
            entry.last_used = self._uses
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
        """These were used, the last one most recently."""
        with self._lock:
            for name in names:
                entry = self._entries.get(name)
                if entry is not None:
                    self._uses += 1
                    entry.last_used = self._uses

    def has(self, name: str) -> bool:
        with self._lock:
            entry = self._entries.get(name)
            return entry is not None and entry.readable

    def knows(self, name: str) -> bool:
        """Whether `name` stands in the books at all, be it only as something that is being written or removed."""
        with self._lock:
            return name in self._entries

    def names(self) -> Iterator[str]:
        """Of all that can be read, the least recently used first."""
        with self._lock:
            return iter(
                sorted((n for n, e in self._entries.items() if e.readable), key=lambda n: self._entries[n].last_used)
            )

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used

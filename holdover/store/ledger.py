"""The books of a tier: what it keeps, how many bytes, in which order of use. The budget holds at every moment."""

import heapq
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from holdover.errors import TierError
from holdover.state.policy import eviction_rank
from holdover.state.segment import Link
from holdover.store.tier import ALONE, PutResult, PutStatus
from holdover.store.usage import OwnUsage, Usage

log = logging.getLogger(__name__)
PARENT_DIGITS = 16  # of a name are enough to tell parents apart
ROWS, WINDOW = ".rows", ".window"
AGE_SHARE = 4  # what saves twice as much for its bytes may be older by a quarter of all: docs/design/store.md


def parent_digits(name: str | None) -> str | None:
    """What stands for a segment where others name it as their parent: the beginning of its name, for window segments
    with a `w` in front. None for what can be nobody's parent, and for None."""
    if name is None or not name.endswith((ROWS, WINDOW)):
        return None
    return f"w{name[: PARENT_DIGITS - 1]}" if name.endswith(WINDOW) else name[:PARENT_DIGITS]


@dataclass(slots=True)
class Entry:
    """A segment in the books. `complete` once it can be read; leases: readers at this moment; doomed: removed, but its
    bytes are still there; dropping: somebody is removing them just now; queued: it stands in the order of eviction.
    parent: stands for the segment that it goes on from (`parent_digits`); tip: the beginning of its own, if known.
    beside: of rows, bytes of the largest snapshot or window that was kept with them.
    """

    nbytes: int
    complete: bool
    parent: str | None
    tip: str
    last_used: int
    leases: int = 0
    doomed: bool = False
    dropping: bool = False
    queued: bool = False
    beside: int = 0

    @property
    def readable(self) -> bool:
        return self.complete and not self.doomed


class Ledger:
    """Leaf first, and of the leaves what is worth least (`policy.eviction_rank`): what saves little recompute for its
    bytes, or was not used for long. A leaf is what no other segment here has as its parent. Room is reserved before
    bytes are made, so that the budget is never passed.

    `drop` removes a segment's bytes, and may take its time: it is called without the lock, so that nobody who only asks
    the books waits for it. Until it is done, the bytes count. Where it raises, they count on, and are dropped when next
    room is needed or the segment is removed again. It returns how many bytes it has freed, if it knows: where
    usage is shared, that may be none, as another process was faster.
    """

    def __init__(self, budget_bytes: int, drop: Callable[[str], int | None], usage: Usage | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._drop = drop
        self._usage = OwnUsage() if usage is None else usage
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._children: Counter[str] = Counter()  # by the beginning of their parent's name; of those not doomed
        self._waiting: dict[str, str] = {}  # rows that would be next to go but for their children
        self._order: list[tuple[float, str]] = []  # a heap; what is worth more by now is put back when its turn comes
        self._parents: dict[str, Entry] = {}  # rows and windows by what stands for them
        self._uses = 0

    def reserve(self, name: str, nbytes: int, link: Link = ALONE) -> PutResult:
        """Enter `name` as incomplete, evicting for it. Raises what `drop` raises, naming all that was evicted."""
        evicted: list[str] = []
        while True:
            with self._lock:
                if name in self._entries:
                    doomed = self._entries[name].doomed
                    return PutResult(PutStatus.REFUSED if doomed else PutStatus.ALREADY_THERE, tuple(evicted))
                try:
                    lacking = self._usage.take(nbytes, self.budget_bytes)
                except TierError as error:
                    error.evicted = tuple(evicted)
                    raise
                if not lacking:
                    self._enter(name, nbytes, link, complete=False)
                    return PutResult(PutStatus.KEPT, tuple(evicted))
                victims = self._victims(lacking)
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

    def shrink(self) -> None:
        """Evict until the budget holds. Raises TierError."""
        while lacking := self._usage.take(0, self.budget_bytes):
            with self._lock:
                victims = self._victims(lacking)
                for name in victims:
                    self._doom(name)
                    self._entries[name].dropping = True
            if not victims:
                return
            for name in victims:
                self._drop_doomed(name)

    def _enter(self, name: str, nbytes: int, link: Link, complete: bool) -> None:
        self._uses += 1
        digits = None if link.parent is None else sys.intern(parent_digits(link.parent) or link.parent)
        entry = self._entries[name] = Entry(nbytes, complete, digits, link.tip[:PARENT_DIGITS], self._uses)
        if digits is not None:
            self._children[digits] += 1
        if (own := parent_digits(name)) is not None:
            self._parents[own] = entry
        if not name.endswith(ROWS) and (rows := self._rows_of(name, entry)) is not None:
            rows.beside = max(rows.beside, nbytes)
        self._queue(name)

    def _rows_of(self, name: str, entry: Entry) -> Entry | None:
        """The rows that a snapshot or window goes with; rows themselves."""
        found: Entry | None = entry
        while found is not None and not name.endswith(ROWS):
            digits = found.parent
            if digits is None:
                return None
            found = self._parents.get(digits)
            name = WINDOW if digits.startswith("w") else ROWS
        return found

    def _rank(self, name: str, entry: Entry) -> float:
        """Rows and the snapshot at their end save the tokens of the rows, and take the bytes of both. The number of
        tokens is as good as their bytes: only ratios count."""
        rows = self._rows_of(name, entry)
        saves, takes = (1, 1) if rows is None else (rows.nbytes, rows.nbytes + rows.beside)
        return eviction_rank(
            last_used=entry.last_used,
            saved_tokens=saves,
            slots=takes,
            horizon=len(self._entries) // AGE_SHARE,
            superseded=False,
        )

    def _queue(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is not None and not entry.queued:
            entry.queued = True
            heapq.heappush(self._order, (self._rank(name, entry), name))

    def _queue_rows(self, digits: str) -> None:
        """The last that went on from these rows is gone."""
        name = self._waiting.pop(digits, None)
        if name is not None:
            self._queue(name)

    def _victims(self, nbytes: int) -> list[str]:
        """What can go to make so much room, in order; nothing if it is not enough."""
        victims: list[str] = []
        gone: Counter[str] = Counter()
        aside: list[str] = []
        while nbytes > 0 and self._order:
            queued_rank, name = heapq.heappop(self._order)
            entry = self._entries.get(name)
            if entry is None:
                continue
            entry.queued = False
            digits = parent_digits(name)
            if digits is not None and self._children[digits] > gone[digits]:
                self._waiting[digits] = name
                continue  # it is queued again when the last of its children goes
            if self._rank(name, entry) > queued_rank:
                self._queue(name)
            elif not entry.complete or entry.leases or entry.dropping:
                aside.append(name)
            else:
                victims.append(name)
                nbytes -= entry.nbytes
                if entry.parent is not None and not entry.doomed:
                    gone[entry.parent] += 1
                    if gone[entry.parent] == self._children[entry.parent]:
                        self._queue_rows(entry.parent)
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
                self._queue_rows(entry.parent)

    def _drop_doomed(self, name: str) -> None:
        try:
            freed = self._drop(name)
        except BaseException:
            with self._lock:
                self._entries[name].dropping = False
                self._queue(name)
            raise
        nbytes = self._strike(name)
        self._usage.give(freed if freed is not None and self._usage.shared else nbytes)

    def _strike(self, name: str) -> int:
        """Its bytes are gone; returns how many they were."""
        with self._lock:
            entry = self._entries.pop(name)
            own = parent_digits(name)
            if own is not None and self._parents.get(own) is entry:
                del self._parents[own]
            return entry.nbytes

    def complete(self, name: str) -> None:
        with self._lock:
            self._entries[name].complete = True

    def adopt(self, name: str, nbytes: int, link: Link = ALONE, over_budget: bool = False) -> bool:
        """Enter something that is there already. False if the budget has no room for it (unless `over_budget`, then
        `shrink` must follow), or it is being removed."""
        with self._lock:
            if name in self._entries:
                self._entries[name].tip = link.tip[:PARENT_DIGITS]
                return self._entries[name].readable
            if over_budget and not self._usage.shared:
                self._usage.give(-nbytes)
            elif not self._usage.shared and self._usage.take(nbytes, self.budget_bytes):
                return False  # where usage is shared, who wrote it has taken the bytes
            self._enter(name, nbytes, link, complete=True)
            return True

    def remove(self, name: str) -> bool:
        """Strike `name` and all that goes on from it; False if it was not there, or is being written. Who is reading it
        can read on to the end.

        Raises TierError if bytes can't be removed; they can't be found all the same.
        """
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or not entry.complete or entry.dropping:
                return False
            dropped = []
            for other in [name, *self._descendants(name)]:
                entry = self._entries[other]
                if entry.complete and not entry.dropping:
                    self._doom(other)
                    entry.dropping = not entry.leases
                    dropped += [other] * entry.dropping
        failure: TierError | None = None
        for other in dropped:
            try:
                self._drop_doomed(other)
            except TierError as error:
                failure = error
        if failure is not None:
            raise failure
        return True

    def _descendants(self, name: str) -> list[str]:
        digits = parent_digits(name)
        if digits is None or not self._children[digits]:
            return []
        children: dict[str, list[str]] = {}
        for other, entry in self._entries.items():
            if entry.parent is not None:
                children.setdefault(entry.parent, []).append(other)
        found = [*children[digits]]
        for other in found:  # which grows
            found += children.get(parent_digits(other) or "", ())
        return found

    def parent(self, name: str) -> str | None:
        """What stands for the segment that this one goes on from, if it is in the books and has one."""
        with self._lock:
            entry = self._entries.get(name)
            return None if entry is None else entry.parent

    def orphans(self) -> list[str]:
        """What goes on from a segment that is not here."""
        with self._lock:
            there = {parent_digits(name) for name in self._entries}
            return [n for n, e in self._entries.items() if e.parent is not None and e.parent not in there]

    def abandon(self, name: str) -> None:
        """What was reserved could not be written."""
        with self._lock:
            self._doom(name)
        self._usage.give(self._strike(name))

    def lease(self, name: str, tip: str | None = None) -> bool:
        """Keep a segment from being evicted. False if it is not there, or another than the one with this tip is."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or not entry.readable or (tip is not None and entry.tip != tip[:PARENT_DIGITS]):
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

    def put_behind(self, names: Iterable[str]) -> None:
        """These, the last one most recently, were used before everything else that is in the books."""
        with self._lock:
            first = {name: i for i, name in enumerate(names)}
            rest = sorted((each for each in self._entries if each not in first), key=self._last_used)
            for use, name in enumerate((*first, *rest)):
                if name in self._entries:
                    self._entries[name].last_used = use
            self._uses = len(self._entries) + len(first)
            for entry in self._entries.values():
                entry.queued = False
            self._order = []
            self._waiting = {}
            for name in self._entries:
                self._queue(name)

    def _last_used(self, name: str) -> int:
        return self._entries[name].last_used

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
        return self._usage.total()

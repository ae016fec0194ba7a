"""When what a turn has added is saved: at its end, or later. What waits is leased: nothing is lost by waiting."""

from dataclasses import dataclass

from holdover.config import SaveMode
from holdover.state.node import Node, path_to
from holdover.state.tree import PrefixTree
from holdover.store.jobs import PrefixContext
from holdover.store.planning import SavePlanner, plan_delta

BACKLOG_BYTES = 64 << 20
LONGEST_WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Saving:
    """plan: what a turn saves; mode: when. backlog_bytes: while so many are being saved, nothing that can wait is added
    to them; wait_seconds: then a turn is saved though nobody wants its room, so that a crash costs no more."""

    plan: SavePlanner = plan_delta
    mode: SaveMode = SaveMode.AUTO
    backlog_bytes: int = BACKLOG_BYTES
    wait_seconds: float = LONGEST_WAIT_SECONDS


@dataclass(frozen=True, slots=True)
class Held:
    """The end of a turn whose state is not saved yet. slots: on its path that are saved nowhere, and cannot leave the
    device; since: by the store's clock; with_snapshot: the snapshot at its end is leased too."""

    node: Node
    context: PrefixContext
    slots: int
    since: float
    with_snapshot: bool


class Deferred:
    """Ends of turns that are to be saved later, the oldest first."""

    def __init__(self, tree: PrefixTree, saving: Saving) -> None:
        self._tree = tree
        self._saving = saving
        self._held: dict[Node, Held] = {}
        self._slots = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, node: Node, context: PrefixContext, now: float) -> None:
        """Keep the state of a turn on the device until it is saved. A turn that this one goes on from waits no longer:
        to save this one is to save of the whole chain what is of use by then."""
        since = now
        path = path_to(node)
        tree, pool = self._tree, self._tree.pool
        unsaved = [each for each in path if each.rows is None]
        slots = sum(len(each.tokens) for each in unsaved) * pool.slots_per_token + pool.slots_per_snapshot
        slots += sum(each.end - each.window_start for each in unsaved) * pool.slots_per_window_row
        with_snapshot = node.snapshot_slots is not None
        tree.lease(node)
        if with_snapshot:
            tree.lease_snapshot(node)
        for each in path:
            if (before := self._held.get(each)) is not None:
                since = min(since, before.since)
                self.release(before)
        self._held[node] = Held(node, context, slots, since, with_snapshot)
        self._slots += slots

    def oldest(self) -> Held | None:
        return next(iter(self._held.values()), None)

    def release(self, held: Held) -> None:
        """It is being saved (and leased for that), or another holds what it held."""
        del self._held[held.node]
        self._slots -= held.slots
        if held.with_snapshot:
            self._tree.release_snapshot(held.node)
        self._tree.release(held.node)

    def next_due(self) -> float | None:
        """When the oldest is due whatever else happens."""
        oldest = self.oldest()
        return None if oldest is None else oldest.since + self._saving.wait_seconds

    def due(self, now: float, backlog_bytes: int, wanted: bool) -> Held | None:
        """What is to be saved next, if now is the time. backlog_bytes: that are being saved just now; wanted: a request
        waits for room on the device."""
        oldest = self.oldest()
        saving = self._saving
        if oldest is None or backlog_bytes >= saving.backlog_bytes:
            return None
        if saving.mode is SaveMode.LAZY and not wanted and now - oldest.since < saving.wait_seconds:
            room = self._tree.pool.num_free + self._tree.evictable_slots()
            if self._slots <= room:  # what is evicted next is saved by then, or on its way
                return None
        return oldest

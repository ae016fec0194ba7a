"""What leaves the device first: queues of nodes, the least worth keeping at their head."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from holdover.state.layout import Layout
from holdover.state.node import Node
from holdover.state.policy import eviction_rank
from holdover.state.pool import DevicePool

MIN_ENTRIES = 64  # a queue that is no longer than this is never ranked anew for its length


class EvictionQueue:
    """Nodes of which something could be evicted.

    A node is added whenever it becomes a candidate. Its rank is computed then, and again when its turn comes: by then
    it may have been used, be worth more because another snapshot has gone, or be no candidate any more. Where ranks
    fall, they must be made anew.
    """

    def __init__(self, is_candidate: Callable[[Node], bool], rank: Callable[[Node], float]) -> None:
        self._is_candidate = is_candidate
        self._rank = rank
        self._heap: list[tuple[float, int, Node]] = []
        self._serial = 0
        self._most = MIN_ENTRIES

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, node: Node) -> None:
        """Queue a candidate. When there are four times as many entries as there were candidates when they were last
        ranked, most are of nodes that were used again, and go."""
        if len(self._heap) > self._most:
            self.rank_again()
        self._serial += 1
        heappush(self._heap, (self._rank(node), self._serial, node))

    def rank_again(self) -> None:
        """One entry for each candidate, ranked anew: for when ranks may have fallen."""
        nodes = {node: None for _, _, node in sorted(self._heap, key=lambda entry: entry[1])}
        self._heap = [(self._rank(node), i, node) for i, node in enumerate(nodes) if self._is_candidate(node)]
        heapify(self._heap)
        self._most = 4 * len(self._heap) + MIN_ENTRIES

    def first(self) -> tuple[float, Node] | None:
        """The candidate that is least worth keeping, with its rank; it stays in the queue."""
        while self._heap:
            queued, _, node = self._heap[0]
            if not self._is_candidate(node):
                heappop(self._heap)
                continue
            rank = self._rank(node)
            if rank <= queued:
                return rank, node
            self._serial += 1
            heapreplace(self._heap, (rank, self._serial, node))
        return None

    def nodes(self) -> set[Node]:
        """All nodes with an entry, for integrity checks."""
        return {node for _, _, node in self._heap}


class EvictionOrder:
    """One order for all that could leave the device, by `eviction_rank`: rows, leaf first, with the snapshot at their
    end; and snapshots that are superseded, alone.

    A node is added whenever it becomes a candidate (`Node.evictable`; `Node.superseded` with no snapshot lease).
    """

    def __init__(self, layout: Layout, pool: DevicePool) -> None:
        self._layout = layout
        self._pool = pool
        self._horizon = 0  # with which the queues were ranked
        self.leaves = EvictionQueue(lambda node: node.evictable, self._rank_of_rows)
        self.superseded = EvictionQueue(
            lambda node: node.superseded and not node.snapshot_leases, self._rank_of_snapshot
        )

    def add_rows(self, node: Node) -> None:
        self.leaves.add(node)

    def add_snapshot(self, node: Node) -> None:
        self.superseded.add(node)

    def follow(self, horizon: int) -> None:
        """Rank anew if the number of snapshots on the device has changed by more than an eighth."""
        if abs(horizon - self._horizon) * 8 > self._horizon:
            self._horizon = horizon
            self.leaves.rank_again()
            self.superseded.rank_again()

    def first(self) -> tuple[Node, bool] | None:
        """What is worth least: a node, and whether its rows go or only its snapshot. None if nothing can go."""
        leaf, snapshot = self.leaves.first(), self.superseded.first()
        if snapshot is not None and (leaf is None or snapshot[0] <= leaf[0]):
            return snapshot[1], False
        return None if leaf is None else (leaf[1], True)

    def _rank_of_rows(self, node: Node) -> float:
        pool = self._pool
        slots = len(node.tokens) * pool.slots_per_token
        slots += (node.end - node.window_start) * pool.slots_per_window_row
        saved = len(node.tokens)
        if not self._layout.resumes_anywhere:
            slots += pool.slots_per_snapshot  # rows that end nowhere are not worth more than those with a snapshot
            saved = _saved_by_snapshot(node) if node.snapshot_slots is not None else saved
        return self._rank(node, saved, slots, superseded=False)

    def _rank_of_snapshot(self, node: Node) -> float:
        return self._rank(node, _saved_by_snapshot(node), self._pool.slots_per_snapshot, superseded=True)

    def _rank(self, node: Node, saved: int, slots: int, superseded: bool) -> float:
        return eviction_rank(
            last_used=node.last_used, saved_tokens=saved, slots=slots, horizon=self._horizon, superseded=superseded
        )


def _saved_by_snapshot(node: Node) -> int:
    """Tokens from the next older position that can be resumed to the node's end."""
    older = node.parent
    while older is not None and older.parent is not None and not older.snapshot_available:
        older = older.parent
    return node.end - (0 if older is None else older.end)

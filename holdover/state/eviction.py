"""What leaves the device first: a queue of nodes, the least worth keeping at its head."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from holdover.state.node import Node


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

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, node: Node, most: int) -> None:
        """Queue a candidate. More than `most` entries are mostly those of nodes that were used again."""
        if len(self._heap) > most:
            self.rank_again()
        self._serial += 1
        heappush(self._heap, (self._rank(node), self._serial, node))

    def rank_again(self) -> None:
        """One entry for each candidate, ranked anew: for when ranks may have fallen."""
        nodes = {node: None for _, _, node in sorted(self._heap, key=lambda entry: entry[1])}
        self._heap = [(self._rank(node), i, node) for i, node in enumerate(nodes) if self._is_candidate(node)]
        heapify(self._heap)

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

"""Which segments tiers keep, or are about to keep, and which nodes of the prefix tree hold their state."""

from holdover.state.node import Node, Saved
from holdover.state.segment import Kind

MOST_READ_FAILURES = 3  # of one segment: then it is given up, not its tier


class SavedSegments:
    """An entry for each segment, under its name, with its holders: the nodes whose rows, windows or snapshot it is."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Saved, list[Node]]] = {}
        self._any_unreachable: set[str] = set()
        self._forgotten: list[Saved] = []

    def find(self, name: str) -> Saved | None:
        entry = self._entries.get(name)
        return None if entry is None else entry[0]

    def all(self) -> list[Saved]:
        return [saved for saved, _ in self._entries.values()]

    def holders(self, saved: Saved) -> list[Node]:
        """Nodes whose state a saved segment holds."""
        return self._entries[saved.name][1]

    def register(self, saved: Saved, nodes: list[Node]) -> None:
        """`saved` will hold the rows of `nodes` (one run of a path), window rows of them, or the snapshot at the end of
        the one node."""
        known, holders = self._entries.setdefault(saved.name, (saved, []))
        for node in nodes:
            if node not in holders:
                holders.append(node)
            if saved.kind is Kind.WINDOW:
                if known not in node.windows_saved:
                    node.windows_saved.append(known)
                    node.windows_saved.sort(key=lambda each: -each.end)
                continue
            before = node.rows if saved.kind is Kind.ROWS else node.snapshot
            if before is not known:
                self._forget_holder(node, before)
            if saved.kind is Kind.ROWS:
                node.rows = known
            else:
                node.snapshot = known

    def split(self, node: Node, upper: Node) -> None:
        """The beginning of `node` is now `upper`: each of the two holds what it has a part of."""
        if node.rows is not None:
            self.holders(node.rows).append(upper)
        for saved in list(node.windows_saved):
            if saved.start < upper.end:
                upper.windows_saved.append(saved)
                self.holders(saved).append(upper)
            if saved.end <= upper.end:
                node.windows_saved.remove(saved)
                self.holders(saved).remove(node)

    def kept(self, name: str, tier: str) -> bool:
        """A tier now keeps the segment `name`. False if nothing here refers to it: then the tier can delete it."""
        saved = self.find(name)
        if saved is None:
            return False
        saved.tiers.add(tier)
        saved.unreachable.discard(tier)
        return True

    def unreachable(self, name: str, tier: str) -> bool:
        """A tier that keeps the segment `name` could not be read. False if that has happened too often: it is lost."""
        saved = self.find(name)
        if saved is None:
            return True
        saved.tiers.discard(tier)
        saved.failures += 1
        if saved.failures >= MOST_READ_FAILURES:
            return False
        saved.unreachable.add(tier)
        self._any_unreachable.add(tier)
        return True

    def reachable(self, tier: str) -> None:
        """A tier works (again): what it could not be asked for is there."""
        if tier not in self._any_unreachable:
            return
        self._any_unreachable.discard(tier)
        for saved in self.all():
            if tier in saved.unreachable:
                saved.unreachable.discard(tier)
                saved.tiers.add(tier)

    def lost(self, name: str, tier: str) -> list[Node]:
        """A tier does not keep the segment `name`, or no longer. Returns its holders if it is gone."""
        saved = self.find(name)
        if saved is None:
            return []
        saved.tiers.discard(tier)
        saved.unreachable.discard(tier)
        if saved.tiers or saved.pending or saved.unreachable:
            return []
        return self.drop(saved)

    def drop(self, saved: Saved) -> list[Node]:
        """Nobody refers to the segment any more. Returns those who did."""
        _, holders = self._entries.pop(saved.name, (saved, []))
        for node in holders:
            if saved.kind is Kind.ROWS:
                node.rows = None
            elif saved.kind is Kind.WINDOW:
                node.windows_saved.remove(saved)
            else:
                node.snapshot = None
        return holders

    def pruned(self, node: Node) -> None:
        """A node is gone, whose rows are saved nowhere: nor is anything else of it of use. So are window segments that
        hold rows of other nodes too: should the same tokens come again, nobody could tell that their rows are in one,
        and they would be saved twice."""
        for saved in (*node.windows_saved, *([] if node.snapshot is None else [node.snapshot])):
            self.drop(saved)
            self._forgotten.append(saved)

    def make_way(self, window: Saved, path: list[Node]) -> bool:
        """Give up window segments on `path` that tiers keep and that overlap `window`, which was found, cut by another
        engine: else a tier would come to keep rows twice. False if one of them is in use."""
        overlapping = {
            each: None
            for node in path
            for each in node.windows_saved
            if each.tiers and each.start < window.end and window.start < each.end
        }
        if any(each.pending for each in overlapping):
            return False
        for each in overlapping:
            self.drop(each)
            self._forgotten.append(each)
        return True

    def take_forgotten(self) -> list[Saved]:
        """Saved segments that are of no use any more, and which the tiers can delete."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _forget_holder(self, node: Node, saved: Saved | None) -> None:
        if saved is not None and saved.name in self._entries:
            holders = self.holders(saved)
            if node in holders:
                holders.remove(node)
            if not holders:
                del self._entries[saved.name]

"""The prefix tree: the one index of what is known, token for token, and where it is resident.

A radix tree over token ids. A node covers tokens `[start, end)`; its rows (token state) are on the device as a whole or
not, and may be saved in any number of tiers. A snapshot lies at the end of a node, never inside: keeping one inside a
node splits it, which moves no bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from holdover.state.address import Tokens
from holdover.state.layout import Layout
from holdover.state.policy import snapshots_to_drop
from holdover.state.pool import DevicePool, Slots
from holdover.state.segment import Kind, segment_name


@dataclass(eq=False, slots=True)
class Saved:
    """A segment that tiers keep, or are about to. After a split, both halves refer to the one segment over them.

    pending: copies into tiers that are under way; while there are any, nobody else saves the same state.
    """

    kind: Kind
    address: bytes
    start: int
    end: int
    tiers: set[str] = field(default_factory=set)
    pending: int = 0

    @property
    def name(self) -> str:
        return segment_name(self.kind, self.address)


@dataclass(eq=False, slots=True)
class Node:
    """Tokens `[start, end)` of one prefix.

    leases: sequences and copies that may read the rows; snapshot_leases: copies that may read the kept snapshot.
    loading: the load that will fill this node's rows, while it runs. boundary: a message boundary, kept when thinning.
    """

    parent: "Node | None"
    tokens: Tokens
    start: int
    space: bytes
    children: dict[int, "Node"] = field(default_factory=dict)
    slots: Slots | None = None
    rows: Saved | None = None
    snapshot_slots: Slots | None = None
    snapshot: Saved | None = None
    leases: int = 0
    snapshot_leases: int = 0
    loading: object | None = None
    generated: bool = False
    boundary: bool = False
    device_children: int = 0
    last_used: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def rows_available(self) -> bool:
        return self.slots is not None or (self.rows is not None and bool(self.rows.tiers)) or len(self.tokens) == 0

    @property
    def snapshot_available(self) -> bool:
        return self.snapshot_slots is not None or (self.snapshot is not None and bool(self.snapshot.tiers))


@dataclass(frozen=True, slots=True)
class Match:
    """How far a token sequence is known.

    known: tokens that some sequence had in common. position: tokens that need no compute, because every kind of state
    is whole there. node: where `position` lies; it ends there, or (only for models that resume anywhere) covers it.
    followed_response: whether the tokens go on along a kept response, or (False) turn away where one begins; None if
    they meet none.
    """

    known: int
    position: int
    node: Node
    followed_response: bool | None = None


def common_length(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that are equal."""
    length = min(len(a), len(b))
    if length == 0 or a[0] != b[0]:
        return 0
    unequal = a[:length] != b[:length]
    first = int(unequal.argmax())
    return first if unequal[first] else length


def _last_used(node: Node) -> int:
    return node.last_used


def path_to(node: Node) -> list[Node]:
    """Nodes from below the root to `node`."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


class PrefixTree:
    """All state that one engine knows of, under the byte budget of its device pool."""

    def __init__(self, layout: Layout, pool: DevicePool) -> None:
        self.layout = layout
        self.pool = pool
        self._roots: dict[bytes, Node] = {}
        self._saved: dict[str, tuple[Saved, list[Node]]] = {}
        self._on_device: dict[Node, None] = {}
        self._snapshots_on_device: dict[Node, None] = {}
        self._uses = 0
        self.num_evicted_tokens = 0

    def root(self, space: bytes) -> Node:
        """The root of one model's and tenant's prefixes, named by the address of position 0."""
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = Node(None, np.empty(0, dtype="<u4"), 0, space)
        return root

    # Finding

    def match(self, root: Node, tokens: Tokens) -> Match:
        """How far `tokens` are known, and from where they can be resumed."""
        node, position, whole = root, 0, True
        resume, resume_node = 0, root
        followed: bool | None = None
        while position < len(tokens):
            child = node.children.get(int(tokens[position]))
            if child is None:
                if any(each.generated for each in node.children.values()):
                    followed = bool(followed)
                break
            length = common_length(child.tokens, tokens[position : position + len(child.tokens)])
            position += length
            followed = followed or child.generated or None
            whole = whole and child.rows_available
            if whole and (not self.layout.recurrent or (length == len(child.tokens) and child.snapshot_available)):
                resume, resume_node = position, child
            node = child
            if length < len(child.tokens):
                break
        if not self.layout.recurrent and resume == len(tokens) > 0:
            ends_here = resume_node.end == resume and resume_node.snapshot_available
            if not ends_here:  # the last token must be fed for its hidden vector
                resume -= 1
                if resume <= resume_node.start:
                    resume_node = resume_node.parent or root
        return Match(known=position, position=resume, node=resume_node, followed_response=followed)

    def node_at(self, match: Match) -> Node:
        """The node that ends at the match's position; splits the one that covers it."""
        return match.node if match.node.end == match.position else self._split(match.node, match.position)

    def _split(self, node: Node, position: int) -> Node:
        """Cut `node` at `position`; returns the new upper half. Moves no bytes."""
        length = position - node.start
        upper = Node(
            parent=node.parent,
            tokens=node.tokens[:length],
            start=node.start,
            space=node.space,
            children={int(node.tokens[length]): node},
            slots=None if node.slots is None else node.slots[:length],
            rows=node.rows,
            leases=node.leases,
            loading=node.loading,
            generated=node.generated,
            device_children=0 if node.slots is None else 1,
            last_used=node.last_used,
        )
        assert node.parent is not None
        node.parent.children[int(node.tokens[0])] = upper
        node.parent, node.tokens, node.start = upper, node.tokens[length:], position
        if node.rows is not None:
            self._saved[node.rows.name][1].append(upper)
        if node.slots is not None:
            node.slots = node.slots[length:]
            self._on_device[upper] = None
        return upper

    # Leases and use

    def lease(self, node: Node) -> None:
        """Promise that the rows from position 0 to the node's end stay; marks them as just used."""
        self._touch(node)
        each: Node | None = node
        while each is not None:
            each.leases += 1
            each = each.parent

    def release(self, node: Node) -> None:
        """Take back one `lease`."""
        each: Node | None = node
        while each is not None:
            if each.leases <= 0:
                raise AssertionError(f"lease released twice at position {each.end}")
            each.leases -= 1
            each = each.parent

    def _touch(self, node: Node) -> None:
        """Mark the path as just used; a parent is never less recent than its children."""
        self._uses += 1
        each: Node | None = node
        while each is not None:
            each.last_used = self._uses
            each = each.parent

    def slots_of(self, node: Node) -> Slots:
        """Slots of all tokens from position 0 to the node's end, [tokens]; all rows must be on the device."""
        parts = []
        for each in path_to(node):
            if each.slots is None:
                raise AssertionError(f"rows [{each.start}, {each.end}) are not on the device")
            parts.append(each.slots)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    # Growing

    def extend(self, node: Node, tokens: Tokens, slots: Slots, generated: bool = False) -> tuple[Node, Slots]:
        """Add computed rows below `node`; returns the node at their end and the slots that now hold them.

        The tree takes over `slots`. Where it knows the same tokens already with rows on the device, it keeps those
        and frees the given ones: one copy per prefix.
        """
        kept: list[Slots] = []
        position = 0
        while position < len(tokens):
            child = node.children.get(int(tokens[position]))
            if child is None:
                child = Node(node, tokens[position:].copy(), node.end, node.space, generated=generated)
                node.children[int(tokens[position])] = child
                self._hold_rows(child, slots[position:])
                kept.append(slots[position:])
                return child, np.concatenate(kept)
            length = common_length(child.tokens, tokens[position : position + len(child.tokens)])
            if length < len(child.tokens):
                child = self._split(child, child.start + length)
            if child.slots is None:
                self._hold_rows(child, slots[position : position + length])
            else:
                self.pool.free_rows(slots[position : position + length])
            assert child.slots is not None
            kept.append(child.slots)
            child.generated = child.generated and generated
            node, position = child, position + length
        return node, (np.concatenate(kept) if kept else np.empty(0, dtype=np.int64))

    def _hold_rows(self, node: Node, slots: Slots) -> None:
        node.slots = slots
        self._on_device[node] = None
        if node.parent is not None:
            node.parent.device_children += 1
        self._touch(node)

    def fill_loaded(self, node: Node, first: int, slots: Slots) -> None:
        """Rows `[first, node.end)` have been loaded into `slots`; the node may have been split meanwhile."""
        each = node
        while each.end > first:
            part = slots[each.start - first : each.end - first]
            each.loading = None
            if each.slots is None:
                self._hold_rows(each, part)
            else:
                self.pool.free_rows(part)
            assert each.parent is not None
            each = each.parent

    def end_loading(self, node: Node, first: int) -> None:
        """The load of rows `[first, node.end)` has failed."""
        each = node
        while each.end > first:
            each.loading = None
            assert each.parent is not None
            each = each.parent

    def keep_snapshot(self, node: Node, slots: Slots, boundary: bool = False) -> None:
        """Take over `slots`, which hold the snapshot at the node's end."""
        node.boundary = node.boundary or boundary
        if node.snapshot_slots is not None:
            self.pool.free(slots)
            return
        node.snapshot_slots = slots
        self._snapshots_on_device[node] = None

    def thin(self, node: Node) -> list[Saved]:
        """Drop snapshots of the chain that ends at `node` which its newer ones make useless.

        Returns the saved segments that the tiers can delete.
        """
        chain = [each for each in path_to(node) if each.snapshot_available]
        thinnable = [each for each in chain if len(each.children) <= 1 and not each.boundary]
        drop = snapshots_to_drop([each.end for each in thinnable])
        deletable = []
        for each in thinnable:
            if each.end in drop and each.snapshot_leases == 0:
                self._drop_device_snapshot(each)
                if each.snapshot is not None:
                    deletable.append(each.snapshot)
                    self._saved.pop(each.snapshot.name, None)
                    each.snapshot = None
        return deletable

    # Tiers

    def register(self, saved: Saved, nodes: list[Node]) -> None:
        """`saved` will hold the rows of `nodes` (one run of a path), or the snapshot at the end of the one node."""
        known, holders = self._saved.setdefault(saved.name, (saved, []))
        for node in nodes:
            if node not in holders:
                holders.append(node)
            before = node.rows if saved.kind is Kind.ROWS else node.snapshot
            if before is not known:
                self._forget_holder(node, before)
            if saved.kind is Kind.ROWS:
                node.rows = known
            else:
                node.snapshot = known

    def kept(self, name: str, tier: str) -> None:
        """A tier now keeps the segment `name`."""
        if name in self._saved:
            self._saved[name][0].tiers.add(tier)

    def find_saved(self, name: str) -> Saved | None:
        entry = self._saved.get(name)
        return None if entry is None else entry[0]

    def _forget_holder(self, node: Node, saved: Saved | None) -> None:
        if saved is not None and saved.name in self._saved:
            holders = self._saved[saved.name][1]
            if node in holders:
                holders.remove(node)
            if not holders:
                del self._saved[saved.name]

    def lost(self, name: str, tier: str) -> None:
        """A tier does not keep the segment `name`, or no longer."""
        entry = self._saved.get(name)
        if entry is None:
            return
        saved, holders = entry
        saved.tiers.discard(tier)
        if saved.tiers or saved.pending:
            return
        del self._saved[name]
        for node in list(holders):
            if saved.kind is Kind.ROWS:
                node.rows = None
            else:
                node.snapshot = None
            self._prune(node)

    def graft(self, parent: Node, tokens: Tokens, saved: Saved, tier: str) -> Node:
        """A tier was found to keep rows below `parent` (at start-up); adds the path. Returns its last node."""
        node, position, nodes = parent, 0, []
        while position < len(tokens):
            child = node.children.get(int(tokens[position]))
            if child is None:
                child = Node(node, tokens[position:].copy(), node.end, node.space)
                node.children[int(tokens[position])] = child
            length = common_length(child.tokens, tokens[position : position + len(child.tokens)])
            if length < len(child.tokens):
                child = self._split(child, child.start + length)
            nodes.append(child)
            node, position = child, position + length
        self.register(saved, nodes)
        self.kept(saved.name, tier)
        return node

    def split_at(self, node: Node, position: int) -> Node:
        """The node on the path to `node` that ends at `position`, splitting the one that covers it."""
        while node.start >= position and node.parent is not None:
            node = node.parent
        return node if node.end == position else self._split(node, position)

    # Evicting from the device

    def make_room(self, count: int) -> bool:
        """Evict until `count` slots are free. False if leases forbid it (then as much as can be is evicted).

        First go snapshots that a newer one of the same chain makes nearly useless, then the least recently used
        rows, leaf first, with their snapshots.
        """
        if self.pool.num_free >= count:
            return True
        for node in sorted(self._snapshots_on_device, key=_last_used):
            if len(node.children) == 1 and not node.boundary and node.snapshot_leases == 0:
                self._drop_device_snapshot(node)
                if self.pool.num_free >= count:
                    return True
        leaves = [(node.last_used, i, node) for i, node in enumerate(self._on_device) if self._evictable(node)]
        heapify(leaves)
        serial = len(self._on_device)
        while leaves:
            node = heappop(leaves)[2]
            parent = node.parent
            self._evict_rows(node)
            if self.pool.num_free >= count:
                return True
            if parent is not None and parent.slots is not None and self._evictable(parent):
                serial += 1
                heappush(leaves, (parent.last_used, serial, parent))
        return False

    @staticmethod
    def _evictable(node: Node) -> bool:
        return node.leases == 0 and node.device_children == 0 and node.loading is None

    def evictable_slots(self) -> int:
        """Slots that `make_room` could free."""
        rows = sum([node.tokens.size for node in self._on_device if node.leases == 0 and node.loading is None])
        rows *= self.pool.slots_per_token
        kept = sum(
            len(node.snapshot_slots)
            for node in self._snapshots_on_device
            if node.snapshot_slots is not None
            and node.snapshot_leases == 0
            and (node.leases == 0 or (len(node.children) == 1 and not node.boundary))
        )
        return rows + kept

    def _drop_device_snapshot(self, node: Node) -> None:
        if node.snapshot_slots is not None:
            self.pool.free(node.snapshot_slots)
            node.snapshot_slots = None
            del self._snapshots_on_device[node]

    def _evict_rows(self, node: Node) -> None:
        assert node.slots is not None
        self.pool.free_rows(node.slots)
        node.slots = None
        self.num_evicted_tokens += len(node.tokens)
        del self._on_device[node]
        if node.parent is not None:
            node.parent.device_children -= 1
        if node.snapshot_leases == 0:
            self._drop_device_snapshot(node)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Forget nodes of which nothing is left anywhere."""
        while (
            node.parent is not None
            and not node.children
            and node.slots is None
            and node.rows is None
            and node.leases == 0
            and node.loading is None
            and node.snapshot_slots is None
        ):
            self._forget_holder(node, node.snapshot)
            parent = node.parent
            if parent.children.get(int(node.tokens[0])) is node:
                del parent.children[int(node.tokens[0])]
            node = parent

    # Checking

    def nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def listed(self, node: Node) -> tuple[bool, bool]:
        """Whether the node is listed as having rows, and a snapshot, on the device."""
        return node in self._on_device, node in self._snapshots_on_device

    def holders(self, saved: Saved) -> list[Node]:
        """Nodes whose state a saved segment holds."""
        return self._saved[saved.name][1]

    def num_leases(self) -> int:
        return sum(node.leases + node.snapshot_leases for node in self.nodes())

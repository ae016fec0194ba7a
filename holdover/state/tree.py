"""The prefix tree: the one index of what is known, token for token, and where it is resident.

A radix tree over token ids. A node covers tokens `[start, end)`; its rows (token state) are on the device as a whole or
not, and may be saved in any number of tiers. A snapshot lies at the end of a node, never inside: keeping one inside a
node splits it, which moves no bytes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from holdover.state.address import Tokens
from holdover.state.eviction import EvictionOrder
from holdover.state.layout import Layout
from holdover.state.node import Match, Node, Saved, common_length, live_windows, path_to
from holdover.state.policy import snapshots_to_drop
from holdover.state.pool import DevicePool, Slots
from holdover.state.saved import SavedSegments
from holdover.state.segment import Kind


class Books(NamedTuple):
    """What a tree has counted and queued: nodes listed with a snapshot on the device, queued as leaves, and queued as
    superseded; tokens and window rows on the device without a lease; leased snapshots."""

    listed: set[Node]
    leaves: set[Node]
    superseded: set[Node]
    unleased_tokens: int
    unleased_window_rows: int
    leased_snapshots: int


class PrefixTree:
    """All state that one engine knows of, under the byte budget of its device pool."""

    def __init__(self, layout: Layout, pool: DevicePool) -> None:
        self.layout = layout
        self.pool = pool
        self._roots: dict[bytes, Node] = {}
        self.saved = SavedSegments()
        self._snapshots_on_device: dict[Node, None] = {}
        self._order = EvictionOrder(layout, pool)
        self._unleased_tokens = 0
        self._unleased_window_rows = 0
        self._leased_snapshots = 0
        self._uses = 0
        self.num_nodes = 0
        self.num_evicted_tokens = 0

    def root(self, space: bytes) -> Node:
        """The root of one model's and tenant's prefixes, named by the address of position 0."""
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = Node(None, b"", 0, space)
        return root

    # Finding

    def match(self, root: Node, tokens: Tokens, on_device: bool = False) -> Match:
        """How far `tokens` are known, and from where they can be resumed. on_device: with no load."""
        node, position, whole = root, 0, True
        resume, resume_node = 0, root
        followed: bool | None = None
        anywhere, window, packed = self.layout.resumes_anywhere, self.layout.window, tokens.tobytes()
        first_row = self.layout.window_first
        window_from = 0  # window rows are whole from there up to `position`
        while position < len(tokens):
            child = node.children.get(tokens.item(position))
            if child is None:
                if node.generated_children:
                    followed = bool(followed)
                break
            to_its_end = packed.startswith(child.packed, 4 * position)
            position += len(child.tokens) if to_its_end else common_length(child.tokens, tokens[position:])
            followed = followed or child.generated or None
            whole = whole and (child.slots is not None if on_device else child.rows_available)
            if window and to_its_end:
                child_from = child.window_start if on_device else child.window_from
                window_from = child_from if child_from > child.start else window_from
            has_snapshot = child.snapshot_slots is not None if on_device else child.snapshot_available
            kept = anywhere or (to_its_end and has_snapshot and window_from <= first_row(position))
            if whole and kept:
                resume, resume_node = position, child
            node = child
            if not to_its_end:
                break
        if anywhere and resume == len(tokens) > 0:
            known = resume_node.snapshot_slots is not None if on_device else resume_node.snapshot_available
            ends_here = resume_node.end == resume and known
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
        assert node.parent is not None
        upper = Node(
            parent=node.parent,
            packed=node.packed[: 4 * length],
            start=node.start,
            space=node.space,
            children={int(node.tokens[length]): node},
            slots=None if node.slots is None else node.slots[:length],
            rows=node.rows,
            leases=node.leases,
            loading=node.loading,
            generated=node.generated,
            device_children=0 if node.slots is None else 1,
            generated_children=int(node.generated),
            last_used=node.last_used,
        )
        self.num_nodes += 1
        in_upper = position - node.window_start
        if node.window is not None and in_upper > 0:
            upper.window = node.window[:in_upper]
            node.window = node.window[in_upper:] if in_upper < len(node.window) else None
        node.parent.children[int(node.tokens[0])] = upper
        node.packed = node.packed[4 * length :]
        node.parent, node.tokens, node.start = upper, np.frombuffer(node.packed, dtype="<u4"), position
        self.saved.split(node, upper)
        if node.slots is not None:
            node.slots = node.slots[length:]
        return upper

    def _new_child(self, node: Node, tokens: Tokens, generated: bool = False) -> Node:
        child = Node(node, tokens.tobytes(), node.end, node.space, generated=generated)
        node.children[int(tokens[0])] = child
        node.generated_children += generated
        self.num_nodes += 1
        if node.superseded:
            self._order.add_snapshot(node)
        return child

    # Leases and use

    def lease(self, node: Node) -> None:
        """Promise that the rows from position 0 to the node's end stay; marks them as just used."""
        self._uses += 1
        uses = self._uses
        each: Node | None = node
        while each is not None:
            if each.leases == 0 and each.slots is not None:
                self._unleased_tokens -= len(each.slots)
                self._unleased_window_rows -= each.end - each.window_start
            each.leases += 1
            each.last_used = uses
            each = each.parent

    def release(self, node: Node) -> None:
        """Take back one `lease`."""
        each: Node | None = node
        while each is not None:
            if each.leases <= 0:
                raise AssertionError(f"lease released twice at position {each.end}")
            each.leases -= 1
            if each.leases == 0 and each.slots is not None:
                self._unleased_tokens += len(each.slots)
                self._unleased_window_rows += each.end - each.window_start
                if each.device_children == 0:
                    self._order.add_rows(each)
            each = each.parent
        self._trim_windows(node, 0)

    def lease_snapshot(self, node: Node) -> None:
        """Promise that the snapshot at the node's end stays on the device, if it is there."""
        node.snapshot_leases += 1
        self._leased_snapshots += node.snapshot_leases == 1 and node.snapshot_slots is not None

    def release_snapshot(self, node: Node) -> None:
        """Take back one `lease_snapshot`."""
        if node.snapshot_leases <= 0:
            raise AssertionError(f"snapshot lease released twice at position {node.end}")
        node.snapshot_leases -= 1
        self._leased_snapshots -= node.snapshot_leases == 0 and node.snapshot_slots is not None
        if node.superseded and not node.snapshot_leases:
            self._order.add_snapshot(node)

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

    def window_of(self, node: Node, first: int) -> Slots:
        """Slots of the window rows `[first, node.end)`, [rows, slots_per_window_row]; all must be on the device."""
        parts = []
        each = node
        while each.end > first:
            start = max(first, each.start)
            if each.window is None or each.window_start > start:
                raise AssertionError(f"window rows [{start}, {each.window_start}) are not on the device")
            parts.append(each.window[start - each.window_start :])
            assert each.parent is not None
            each = each.parent
        return np.concatenate(parts[::-1]) if parts else np.empty((0, self.pool.slots_per_window_row), dtype=np.int64)

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
                child = self._new_child(node, tokens[position:], generated)
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
            if child.generated and not generated:
                child.generated = False
                node.generated_children -= 1
            node, position = child, position + length
        return node, (np.concatenate(kept) if kept else np.empty(0, dtype=np.int64))

    def _hold_rows(self, node: Node, slots: Slots) -> None:
        node.slots = slots
        if node.parent is not None:
            node.parent.device_children += 1
        self._touch(node)
        if node.leases == 0:
            self._unleased_tokens += len(slots)
            if node.device_children == 0:
                self._order.add_rows(node)

    def hold_window(self, node: Node, first: int, slots: Slots) -> None:
        """Take over the window rows of the path to `node` that `slots` hold, of positions from `first` on.

        slots: [rows, slots_per_window_row]. Where the tree has the row on the device already, the given one is freed.
        """
        each = node
        while each.end > first:
            start = max(first, each.start)
            mine = slots[start - first : each.end - first]
            if len(mine):
                assert each.slots is not None and start + len(mine) >= each.window_start, "window rows with a hole"
                new = max(0, each.window_start - start)
                self.pool.free_window(mine[new:])
                if new:
                    each.window = mine[:new] if each.window is None else np.concatenate([mine[:new], each.window])
                    self._unleased_window_rows += new if each.leases == 0 else 0
            assert each.parent is not None
            each = each.parent

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
        self._leased_snapshots += node.snapshot_leases > 0
        if node.superseded:
            self._order.add_snapshot(node)

    def thin(self, node: Node) -> list[Saved]:
        """Drop snapshots of the chain that ends at `node` which its newer ones make useless, and window rows that are
        of use to none of those that are left. The caller holds one lease of the node and reads no such rows.

        Returns the saved segments that the tiers can delete.
        """
        chain = [each for each in path_to(node) if each.snapshot_available]
        thinnable = [each for each in chain if len(each.children) <= 1 and not each.boundary]
        drop = snapshots_to_drop([each.end for each in thinnable])
        deletable = []
        for each in thinnable:
            under_way = each.snapshot_leases or (each.snapshot is not None and each.snapshot.pending)
            if each.end in drop and not under_way:
                self._drop_device_snapshot(each)
                if each.snapshot is not None:
                    deletable.append(each.snapshot)
                    self.saved.drop(each.snapshot)
        self._trim_windows(node, 1)
        return deletable + self._useless_windows(node)

    def _trim_windows(self, node: Node, leases: int) -> None:
        """Free window rows on the path to `node` that are of no use any more, where it has at most so many leases."""
        if not self.layout.window:
            return
        for each, live in live_windows(node, self.layout):
            useless = live - each.window_start
            if each.window is None or useless <= 0 or each.leases > leases:
                continue
            self.pool.free_window(each.window[:useless])
            if each.leases == 0:
                self._unleased_window_rows -= min(useless, len(each.window))
            each.window = each.window[useless:] if useless < len(each.window) else None

    def _useless_windows(self, node: Node) -> list[Saved]:
        """Forget saved window segments on the path to `node` of which no row is of use any more; returns them."""
        live = dict(live_windows(node, self.layout)) if self.layout.window else {}
        useless = []
        for saved in dict.fromkeys(saved for each in live for saved in each.windows_saved):
            holders = self.saved.holders(saved)
            if not saved.pending and all(live.get(each, 0) >= min(saved.end, each.end) for each in holders):
                useless.append(saved)
                self.saved.drop(saved)
        return useless

    # Tiers

    def unreachable(self, name: str, tier: str) -> None:
        """A tier that keeps the segment `name` could not be read."""
        if not self.saved.unreachable(name, tier):
            self.lost(name, tier)

    def lost(self, name: str, tier: str) -> None:
        """A tier does not keep the segment `name`, or no longer."""
        for node in self.saved.lost(name, tier):
            self._prune(node)

    def node_ending_at(self, root: Node, tokens: Tokens, position: int) -> Node | None:
        """The node that ends at `position` on the path along `tokens`, splitting the one that covers it. None if the
        tree does not know them so far."""
        node = root
        while node.end < position:
            child = node.children.get(tokens.item(node.end))
            if child is None:
                return None
            last = min(child.end, position)
            if common_length(child.tokens, tokens[child.start : last]) < last - child.start:
                return None
            node = child if child.end <= position else self._split(child, position)
        return node

    def covered_by(self, root: Node, tokens: Tokens, tier: str) -> list[tuple[Saved, int]]:
        """Rows segments of `tokens` that a tier is known to keep, from position 0 on, each with the position up to
        which its rows are theirs."""
        node, position = root, 0
        covered: dict[Saved, int] = {}
        while position < len(tokens):
            child = node.children.get(tokens.item(position))
            if child is None or child.rows is None or tier not in child.rows.tiers:
                break
            position += common_length(child.tokens, tokens[position : position + len(child.tokens)])
            covered[child.rows] = position
            if position < child.end:
                break
            node = child
        return list(covered.items())

    def graft(self, parent: Node, tokens: Tokens, saved: Saved, tier: str) -> Node | None:
        """A tier was found to keep rows below `parent`; adds the path. Returns its last node; None, and nothing is
        changed, if the tree knows other segments for a part of these rows."""
        known = self.saved.find(saved.name)
        if known is not None:
            if (known.start, known.end) != (saved.start, saved.end):
                return None
            last = self.node_ending_at_below(parent, tokens)
            if last is not None and last.rows is known:
                self.saved.kept(saved.name, tier)
            return last
        if self._held_by_others(parent, tokens):
            return None
        node, position, nodes = parent, 0, []
        while position < len(tokens):
            child = node.children.get(int(tokens[position]))
            if child is None:
                child = self._new_child(node, tokens[position:])
            length = common_length(child.tokens, tokens[position : position + len(child.tokens)])
            if length < len(child.tokens):
                child = self._split(child, child.start + length)
            nodes.append(child)
            node, position = child, position + length
        self.saved.register(saved, nodes)
        self.saved.kept(saved.name, tier)
        return node

    def learn(self, node: Node, saved: Saved, tier: str) -> bool:
        """A tier was found to keep a snapshot or window rows that end where `node` does. False if their rows, or other
        segments of the same, are not as they should be."""
        path = [each for each in path_to(node) if each.start < saved.end and (saved.start < each.end)]
        if saved.kind is Kind.SNAPSHOT:
            path = [node]
        if not path or not all(each.rows_available for each in path):
            return False
        known = self.saved.find(saved.name)
        if known is not None and known.cut != saved.cut:
            return False
        if known is None:
            if saved.kind is Kind.WINDOW and not self.saved.make_way(saved, path):
                return False
            self.saved.register(saved, path)
        self.saved.kept(saved.name, tier)
        return True

    def node_ending_at_below(self, parent: Node, tokens: Tokens) -> Node | None:
        """The node that ends where `tokens`, which follow `parent`, do."""
        node, position = parent, 0
        while position < len(tokens):
            child = node.children.get(tokens.item(position))
            if child is None or common_length(child.tokens, tokens[position:]) < len(child.tokens):
                return None
            node, position = child, position + len(child.tokens)
        return node

    def _held_by_others(self, parent: Node, tokens: Tokens) -> bool:
        node, position = parent, 0
        while position < len(tokens):
            child = node.children.get(tokens.item(position))
            if child is None:
                return False
            length = common_length(child.tokens, tokens[position:])
            if child.rows is not None:
                return True
            if length < len(child.tokens):
                return False
            node, position = child, position + length
        return False

    def split_at(self, node: Node, position: int) -> Node:
        """The node on the path to `node` that ends at `position`, splitting the one that covers it."""
        while node.start >= position and node.parent is not None:
            node = node.parent
        return node if node.end == position else self._split(node, position)

    # Evicting from the device

    def make_room(self, count: int) -> bool:
        """Evict until `count` slots are free. False if leases forbid it (then as much as can be is evicted).

        What is worth least goes first (`policy.eviction_rank`): rows, leaf first, with their snapshots, and snapshots
        that a newer one of the same chain makes nearly useless; at last the snapshots of rows that are leased.
        """
        pool = self.pool
        if pool.num_free < count:
            self._order.follow(len(self._snapshots_on_device))
        while pool.num_free < count and (first := self._order.first()) is not None:
            node, with_rows = first
            if with_rows:
                self._evict_rows(node)
            else:
                self._drop_device_snapshot(node)
        if pool.num_free < count:
            for node in sorted(self._snapshots_on_device, key=lambda node: node.last_used):
                if node.snapshot_leases == 0:
                    self._drop_device_snapshot(node)
                    if pool.num_free >= count:
                        break
        return pool.num_free >= count

    def evictable_slots(self) -> int:
        """Slots that `make_room` could free."""
        snapshots = len(self._snapshots_on_device) - self._leased_snapshots
        return (
            self._unleased_tokens * self.pool.slots_per_token
            + self._unleased_window_rows * self.pool.slots_per_window_row
            + snapshots * self.pool.slots_per_snapshot
        )

    def _drop_device_snapshot(self, node: Node) -> None:
        if node.snapshot_slots is not None:
            self.pool.free(node.snapshot_slots)
            node.snapshot_slots = None
            del self._snapshots_on_device[node]
            self._leased_snapshots -= node.snapshot_leases > 0

    def _evict_rows(self, node: Node) -> None:
        assert node.slots is not None
        self.pool.free_rows(node.slots)
        node.slots = None
        if node.window is not None:
            self._unleased_window_rows -= len(node.window)
            self.pool.free_window(node.window)
            node.window = None
        self.num_evicted_tokens += len(node.tokens)
        self._unleased_tokens -= len(node.tokens)
        if node.parent is not None:
            node.parent.device_children -= 1
            if node.parent.evictable:
                self._order.add_rows(node.parent)
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
            self.saved.pruned(node)
            parent = node.parent
            if parent.children.get(int(node.tokens[0])) is node:
                del parent.children[int(node.tokens[0])]
                parent.generated_children -= node.generated
                self.num_nodes -= 1
                if parent.superseded:
                    self._order.add_snapshot(parent)
            node = parent

    # Checking

    @property
    def num_roots(self) -> int:
        return len(self._roots)

    def nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def books(self) -> Books:
        """What the tree has counted and queued, for integrity checks."""
        return Books(
            set(self._snapshots_on_device),
            self._order.leaves.nodes(),
            self._order.superseded.nodes(),
            self._unleased_tokens,
            self._unleased_window_rows,
            self._leased_snapshots,
        )

    def num_leases(self) -> int:
        return sum(node.leases + node.snapshot_leases for node in self.nodes())

"""How a sequence takes, keeps and gives back state on the device. The only code that moves slots between owners."""

from bisect import bisect_right
from enum import Enum

import numpy as np

from holdover.engine.sequence import Sequence
from holdover.state.node import Match, Node, Saved, path_to
from holdover.state.pool import DevicePool, Slots
from holdover.state.segment import Kind, state_bytes
from holdover.state.tree import PrefixTree
from holdover.store.jobs import LoadJob, LoadPart

GROWTH_RESERVE_TOKENS = 32  # kept free for each running sequence, so that admitting one does not preempt another


class Taken(Enum):
    """What came of a try to take a place on the device."""

    READY = "ready"
    LOADING = "loading"
    NO_ROOM = "no room"
    NEVER = "never"  # not even an empty device could hold it
    BUSY = "busy"  # what it needs is being loaded for another


class Holdings:
    """The device's slots and live rows, as sequences hold them."""

    def __init__(self, tree: PrefixTree, pool: DevicePool, max_batch_tokens: int, tiers: tuple[str, ...] = ()) -> None:
        self.tree = tree
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self._free_live_rows = list(range(pool.max_running))[::-1]
        self._growing: list[Sequence] = []
        self._loads: dict[LoadJob, None] = {}
        self._tiers = tiers  # nearest first

    def _nearest_of(self, saved: Saved) -> str | None:
        return next((tier for tier in self._tiers if tier in saved.tiers), None)

    @property
    def num_running(self) -> int:
        return self.pool.max_running - len(self._free_live_rows)

    def take(self, sequence: Sequence, match: Match) -> tuple[Taken, LoadJob | None]:
        """Give the sequence slots for all its tokens and a live row, and what is known of its state.

        Returns LOADING with the job that fetches the rest, or READY. Otherwise nothing has changed hands.
        """
        tree, pool = self.tree, self.pool
        position, length = match.position, sequence.length
        path = path_to(match.node)
        lacking = [node for node in path if node.slots is None and node.start < position]
        if any(node.loading is not None for node in lacking):
            return Taken.BUSY, None
        to_load = sum(min(node.end, position) - node.start for node in lacking)
        keep = pool.slots_per_snapshot if position < length else 0
        need = (to_load + (length - position) + 1) * pool.slots_per_token + keep
        windows = self._window_to_load(path, tree.layout.window_first(position))
        window_rows = sum(last - first for _, (_, first, last) in windows) + self.window_rows(length - position + 1)
        need += window_rows * pool.slots_per_window_row
        least = self.slots_for(length + 1) - pool.slots_per_snapshot + keep
        if least > pool.num_slots:
            return Taken.NEVER, None
        if not self._free_live_rows:
            return Taken.NO_ROOM, None
        reserve = sum(min(GROWTH_RESERVE_TOKENS, self._room_to_grow(other)) for other in self._growing)
        reserve *= pool.slots_per_token + pool.slots_per_window_row
        node = tree.node_at(match)
        tree.lease(node)
        tree.lease_snapshot(node)
        if pool.num_free < need + reserve and pool.num_free + tree.evictable_slots() < need + reserve:
            tree.release_snapshot(node)
            tree.release(node)
            if self._growing or self._leased_elsewhere():
                return Taken.NO_ROOM, None
            if position == 0:
                return Taken.NEVER, None
            # What it would go on from takes the last of the room: it fits only from the beginning.
            return self.take(sequence, Match(match.known, 0, tree.root(sequence.space), match.followed_response))
        if not tree.make_room(need):
            raise AssertionError("slots that counted as evictable could not be evicted")
        tree.release_snapshot(node)
        job = self._fill(sequence, node, position)
        return (Taken.READY if job is None else Taken.LOADING), job

    def to_load(self, match: Match) -> dict[str, int]:
        """Bytes that going on from there has to load, by the nearest tier that keeps them."""
        layout = self.tree.layout
        path = path_to(match.node)
        by_tier: dict[str, int] = {}

        def add(saved: Saved | None, count: int) -> None:
            if saved is not None and (tier := self._nearest_of(saved)) is not None:
                by_tier[tier] = by_tier.get(tier, 0) + count * state_bytes(layout, saved.kind)

        for node in path:
            if node.slots is None:
                add(node.rows, len(node.tokens))
        for _, (saved, first, last) in self._window_to_load(path, layout.window_first(match.position)):
            add(saved, last - first)
        if match.position and match.node.end == match.position and match.node.snapshot_slots is None:
            add(match.node.snapshot, 1)
        return by_tier

    def window_rows(self, num_tokens: int) -> int:
        """Window rows that a sequence needs of its own to be fed `num_tokens` tokens: those of use, and of one step."""
        layout = self.tree.layout
        return min(num_tokens, layout.window + layout.window_block - 1 + self.max_batch_tokens) if layout.window else 0

    def slots_for(self, num_tokens: int) -> int:
        """The most slots that a request with so many tokens, its answer included, can need at once."""
        pool = self.pool
        rows = num_tokens * pool.slots_per_token + self.window_rows(num_tokens) * pool.slots_per_window_row
        return rows + pool.slots_per_snapshot

    def longest_request(self, context_length: int) -> int:
        """The most tokens that a request can have: all that the model takes, or that the device can hold."""
        return bisect_right(range(1, context_length + 1), self.pool.num_slots, key=self.slots_for)

    def _window_to_load(self, path: list[Node], start: int) -> list[tuple[Node, tuple[Saved, int, int]]]:
        """What is not on the device of the path's window rows from position `start` on."""
        if not self.tree.layout.window:
            return []
        return [(node, part) for node in path if node.end > start for part in node.window_to_load(start)]

    def _leased_elsewhere(self) -> bool:
        """Whether something still runs (a save) whose end will free slots."""
        return self.tree.num_leases() > 0

    @staticmethod
    def _room_to_grow(sequence: Sequence) -> int:
        return len(sequence.tokens) - sequence.length

    def _fill(self, sequence: Sequence, node: Node, position: int) -> LoadJob | None:
        pool, length = self.pool, sequence.length
        path = path_to(node)
        live_row = self._free_live_rows.pop()
        lacking = [each for each in path if each.slots is None]
        parts: list[LoadPart] = []
        table: list[Slots] = []
        job: LoadJob | None = None
        snapshot = self._snapshot_for(node, position, length)
        sequence.window_start = self.tree.layout.window_first(position)
        windows = self._window_to_load(path, sequence.window_start)
        if lacking or windows or isinstance(snapshot, Saved):
            job = LoadJob(parts, snapshot if isinstance(snapshot, Saved) else None, live_row, sequence)
        for each in path:
            if each.slots is not None:
                table.append(each.slots)
                continue
            assert each.rows is not None
            slots = self._allocate_rows(len(each.tokens))
            each.loading = job
            parts.append(LoadPart(each.rows, each, each.start, each.end, slots, each.tokens))
            table.append(slots)
        for each, (saved, first, last) in windows:
            ids = each.tokens[first - each.start : last - each.start]
            parts.append(LoadPart(saved, each, first, last, self._allocate_window(last - first), ids))
        table.append(self._allocate_rows(length - position))
        filled = np.concatenate(table)
        sequence.table = np.empty(len(sequence.tokens), dtype=np.int64)
        sequence.table[:length] = filled
        sequence.allocated = length
        sequence.node, sequence.shared, sequence.position = node, position, position
        sequence.spare = self._allocate(pool.slots_per_snapshot) if position < length else None
        sequence.live_row = live_row
        if self.tree.layout.window:
            sequence.window = np.empty((len(sequence.tokens), pool.slots_per_window_row), dtype=np.int64)
            sequence.window_shared = position
            sequence.window_spare = [self._allocate_window(self.window_rows(length - position))]
            if job is None:
                self._take_window(sequence)
        if job is not None:
            self._loads[job] = None
        if isinstance(snapshot, Saved):
            pass  # the load fills the live row
        elif snapshot is not None:
            pool.resume_snapshot(snapshot, live_row)
        else:
            pool.clear_live(live_row)
        self._growing.append(sequence)
        return job

    def _snapshot_for(self, node: Node, position: int, length: int) -> Slots | Saved | None:
        """The snapshot to go on from: on the device, saved, or none needed."""
        if position == 0 or (self.tree.layout.resumes_anywhere and position != length):
            return None
        if node.snapshot_slots is not None:
            return node.snapshot_slots
        assert node.snapshot is not None
        return node.snapshot

    def _allocate(self, count: int) -> Slots:
        slots = self.pool.allocate(count)
        if slots is None:
            raise AssertionError("room that was made is gone")
        return slots

    def _allocate_rows(self, count: int) -> Slots:
        slots = self.pool.allocate_rows(count)
        if slots is None:
            raise AssertionError("room that was made is gone")
        return slots

    def _allocate_window(self, count: int) -> Slots:
        slots = self.pool.allocate_window(count)
        if slots is None:
            raise AssertionError("room that was made is gone")
        return slots

    def _take_window(self, sequence: Sequence) -> None:
        """Point the sequence at the window rows that the tree holds for it."""
        if self.tree.layout.window and sequence.node is not None:
            first = sequence.window_start
            sequence.window[first : sequence.shared] = self.tree.window_of(sequence.node, first)

    def loaded(self, sequence: Sequence, job: LoadJob) -> None:
        """The load has put everything in place."""
        del self._loads[job]
        for part in job.parts:
            if part.saved.kind is Kind.WINDOW:
                self.tree.hold_window(part.node, part.first, part.slots)
            else:
                self.tree.fill_loaded(part.node, part.first, part.slots)
        if sequence.node is not None:
            sequence.table[: sequence.shared] = self.tree.slots_of(sequence.node)
            self._take_window(sequence)

    def load_failed(self, sequence: Sequence, job: LoadJob) -> None:
        """The load has failed: the sequence holds nothing any more."""
        del self._loads[job]
        for part in job.parts:
            if part.saved.kind is Kind.WINDOW:
                self.pool.free_window(part.slots)
            else:
                self.tree.end_loading(part.node, part.first)
                self.pool.free_rows(part.slots)
        self.let_go(sequence)

    def grow(self, sequence: Sequence) -> bool:
        """Slots for the next token to be fed. False if there are none."""
        grows = sequence.position >= sequence.allocated
        wants_window = self.pool.slots_per_window_row > 0 and not self._num_spare(sequence)
        need = grows * self.pool.slots_per_token + wants_window * self.pool.slots_per_window_row
        if not self.tree.make_room(need):
            return False
        if grows:
            sequence.table[sequence.allocated] = self._allocate_rows(1)[0]
            sequence.allocated += 1
        if wants_window:
            sequence.window_spare.append(self._allocate_window(1))
        return True

    @staticmethod
    def _num_spare(sequence: Sequence) -> int:
        return sum(map(len, sequence.window_spare))

    def feed(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the next `num_tokens` tokens their window rows."""
        if not self.pool.slots_per_window_row or not num_tokens:
            return
        spare = np.concatenate(sequence.window_spare)
        if len(spare) < num_tokens:
            raise AssertionError(f"{len(spare)} window rows for {num_tokens} tokens")
        sequence.window[sequence.position : sequence.position + num_tokens] = spare[:num_tokens]
        sequence.window_spare = [spare[num_tokens:]]

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """The next `num_tokens` tokens have been fed; window rows that no later token reads are spare again."""
        sequence.position += num_tokens
        if not self.pool.slots_per_window_row:
            return
        start = self.tree.layout.window_first(sequence.position)
        own = max(sequence.window_start, sequence.window_shared)
        if start > own:
            sequence.window_spare.append(sequence.window[own:start].copy())
        sequence.window_start = max(sequence.window_start, start)

    def publish(self, sequence: Sequence, generated: bool, goes_on: bool = True) -> Node:
        """Hand the rows up to the sequence's position to the tree. Returns the node that ends there. `goes_on`: the
        sequence will be fed more tokens."""
        assert sequence.node is not None
        first, last = sequence.shared, sequence.position
        if last > first:
            node, slots = self.tree.extend(
                sequence.node, sequence.tokens[first:last], sequence.table[first:last].copy(), generated
            )
            sequence.table[first:last] = slots
            self.tree.lease(node)
            self.tree.release(sequence.node)
            sequence.node, sequence.shared = node, last
            self._publish_window(sequence, goes_on)
        return sequence.node

    def _publish_window(self, sequence: Sequence, goes_on: bool) -> None:
        """Hand the sequence's own window rows to the tree, if there is room for as many as it needs to go on. If not,
        it keeps them, and no snapshot is kept here: it could not be gone on from."""
        if not self.pool.slots_per_window_row:
            return
        assert sequence.node is not None
        wanted = self.window_rows(sequence.length - sequence.position) if goes_on else 0
        lacking = max(0, wanted - self._num_spare(sequence))
        if not self.tree.make_room(lacking * self.pool.slots_per_window_row):
            return
        sequence.window_spare.append(self._allocate_window(lacking))
        first = max(sequence.window_start, sequence.window_shared)
        self.tree.hold_window(sequence.node, first, sequence.window[first : sequence.position].copy())
        sequence.window_shared = sequence.position
        self._take_window(sequence)

    def keep_snapshot(self, sequence: Sequence, boundary: bool = False) -> bool:
        """Keep the live state as the snapshot of the published node. False if there is no room for it."""
        node = sequence.node
        assert node is not None and node.end == sequence.position and sequence.live_row is not None
        if node.snapshot_available or self.pool.slots_per_snapshot == 0:
            node.boundary = node.boundary or boundary
            return True
        if self.pool.slots_per_window_row and sequence.window_shared < sequence.position:
            return False
        slots = sequence.spare
        if slots is None or sequence.position < sequence.prompt_end:  # the spare one is for the prompt's end
            if not self.tree.make_room(self.pool.slots_per_snapshot):
                return False
            slots = self._allocate(self.pool.slots_per_snapshot)
        else:
            sequence.spare = None
        self.pool.keep_snapshot(sequence.live_row, slots)
        self.tree.keep_snapshot(node, slots, boundary)
        return True

    def let_go(self, sequence: Sequence) -> None:
        """Take back everything that the sequence holds; what it published stays in the tree."""
        if sequence.node is None or sequence.live_row is None:
            return
        self.pool.free_rows(sequence.table[sequence.shared : sequence.allocated])
        for slots in self._own_window(sequence):
            self.pool.free_window(slots)
        if sequence.spare is not None:
            self.pool.free(sequence.spare)
        self.tree.release(sequence.node)
        self._free_live_rows.append(sequence.live_row)
        sequence.node, sequence.live_row, sequence.spare = None, None, None
        sequence.shared = sequence.allocated = sequence.position = 0
        sequence.window_start = sequence.window_shared = 0
        sequence.window_spare = []
        self._growing.remove(sequence)

    def _own_window(self, sequence: Sequence) -> list[Slots]:
        """Window rows that are the sequence's own, in use or spare."""
        if not self.pool.slots_per_window_row:
            return []
        first = max(sequence.window_start, sequence.window_shared)
        return [sequence.window[first : sequence.position], *sequence.window_spare]

    def held_slots(self) -> Slots:
        """Slots that sequences and loads own themselves, for integrity checks."""
        parts = [sequence.spare for sequence in self._growing if sequence.spare is not None]
        parts += [slots.reshape(-1) for sequence in self._growing for slots in self._own_window(sequence)]
        if self.pool.slots_per_token:
            parts += [sequence.table[sequence.shared : sequence.allocated] for sequence in self._growing]
        for part in (part for job in self._loads for part in job.parts):
            if self.pool.slots_per_token or part.saved.kind is Kind.WINDOW:
                parts.append(part.slots.reshape(-1))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

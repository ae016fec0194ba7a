"""How a sequence takes, keeps and gives back state on the device. The only code that moves slots between owners."""

from enum import Enum

import numpy as np

from holdover.engine.sequence import Sequence
from holdover.state.node import Match, Node, Saved, path_to
from holdover.state.pool import DevicePool, Slots
from holdover.state.tree import PrefixTree
from holdover.store.queues import LoadJob, LoadPart

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

    def __init__(self, tree: PrefixTree, pool: DevicePool) -> None:
        self.tree = tree
        self.pool = pool
        self._free_live_rows = list(range(pool.max_running))[::-1]
        self._growing: list[Sequence] = []

    @property
    def num_running(self) -> int:
        return self.pool.max_running - len(self._free_live_rows)

    def take(self, sequence: Sequence, match: Match) -> tuple[Taken, LoadJob | None]:
        """Give the sequence slots for all its tokens and a live row, and what is known of its state.

        Returns LOADING with the job that fetches the rest, or READY. Otherwise nothing has changed hands.
        """
        tree, pool = self.tree, self.pool
        position, length = match.position, sequence.length
        lacking = [node for node in path_to(match.node) if node.slots is None and node.start < position]
        if any(node.loading is not None for node in lacking):
            return Taken.BUSY, None
        to_load = sum(min(node.end, position) - node.start for node in lacking)
        keep = pool.slots_per_snapshot if position < length else 0
        need = (to_load + (length - position) + 1) * pool.slots_per_token + keep
        least = (length + 1) * pool.slots_per_token + keep
        if least > pool.num_slots:
            return Taken.NEVER, None
        if not self._free_live_rows:
            return Taken.NO_ROOM, None
        reserve = sum(min(GROWTH_RESERVE_TOKENS, self._room_to_grow(other)) for other in self._growing)
        reserve *= pool.slots_per_token
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
        if lacking or isinstance(snapshot, Saved):
            job = LoadJob(parts, snapshot if isinstance(snapshot, Saved) else None, live_row, sequence)
        for each in path:
            if each.slots is not None:
                table.append(each.slots)
                continue
            assert each.rows is not None
            slots = self._allocate_rows(len(each.tokens))
            each.loading = job
            parts.append(LoadPart(each.rows, each, each.start, each.end, slots))
            table.append(slots)
        table.append(self._allocate_rows(length - position))
        filled = np.concatenate(table)
        sequence.table = np.empty(len(sequence.tokens), dtype=np.int64)
        sequence.table[:length] = filled
        sequence.allocated = length
        sequence.node, sequence.shared, sequence.position = node, position, position
        sequence.spare = self._allocate(pool.slots_per_snapshot) if position < length else None
        sequence.live_row = live_row
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
        if position == 0 or not (self.tree.layout.recurrent or position == length):
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

    def loaded(self, sequence: Sequence, job: LoadJob) -> None:
        """The load has put everything in place."""
        for part in job.parts:
            self.tree.fill_loaded(part.node, part.first, part.slots)
        if sequence.node is not None:
            sequence.table[: sequence.shared] = self.tree.slots_of(sequence.node)

    def load_failed(self, sequence: Sequence, job: LoadJob) -> None:
        """The load has failed: the sequence holds nothing any more."""
        for part in job.parts:
            self.tree.end_loading(part.node, part.first)
            self.pool.free_rows(part.slots)
        self.let_go(sequence)

    def grow(self, sequence: Sequence) -> bool:
        """A slot for the next token to be fed. False if there is none."""
        if sequence.position < sequence.allocated:
            return True
        if not self.tree.make_room(self.pool.slots_per_token):
            return False
        sequence.table[sequence.allocated] = self._allocate_rows(1)[0]
        sequence.allocated += 1
        return True

    def publish(self, sequence: Sequence, generated: bool) -> Node:
        """Hand the rows up to the sequence's position to the tree. Returns the node that ends there."""
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
        return sequence.node

    def keep_snapshot(self, sequence: Sequence, boundary: bool = False) -> bool:
        """Keep the live state as the snapshot of the published node. False if there is no room for it."""
        node = sequence.node
        assert node is not None and node.end == sequence.position and sequence.live_row is not None
        if node.snapshot_available or self.pool.slots_per_snapshot == 0:
            node.boundary = node.boundary or boundary
            return True
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
        if sequence.spare is not None:
            self.pool.free(sequence.spare)
        self.tree.release(sequence.node)
        self._free_live_rows.append(sequence.live_row)
        sequence.node, sequence.live_row, sequence.spare = None, None, None
        sequence.shared = sequence.allocated = sequence.position = 0
        self._growing.remove(sequence)

    def held_slots(self) -> Slots:
        """Slots that sequences and loads own themselves, for integrity checks."""
        parts = [sequence.spare for sequence in self._growing if sequence.spare is not None]
        if not self.pool.slots_per_token:
            return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        parts += [sequence.table[sequence.shared : sequence.allocated] for sequence in self._growing]
        loading = {id(node.loading): node.loading for node in self.tree.nodes() if node.loading is not None}
        for job in loading.values():
            assert isinstance(job, LoadJob)
            parts += [part.slots for part in job.parts]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

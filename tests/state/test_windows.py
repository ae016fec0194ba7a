"""Sliding windows: only rows that someone may still read are kept, each once, and they are the right ones."""

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdover.state.address import AddressChain, Tokens, as_tokens
from holdover.state.integrity import check_integrity
from holdover.state.layout import LAST_HIDDEN, ArraySpec, Layout
from holdover.state.node import Node, Saved, live_windows, path_to
from holdover.state.pool import DevicePool
from holdover.state.segment import Kind
from holdover.state.tree import PrefixTree
from holdover.store.jobs import PrefixContext
from holdover.store.planning import plan_delta

SPACE = bytes(32)
HIDDEN = ArraySpec(LAST_HIDDEN, (4,), torch.float32)
FULL = ArraySpec("layers.0.kv", (2, 2), torch.float32)
SLIDING = tuple(ArraySpec(f"layers.{i}.kv", (2, 2), torch.float32) for i in range(1, 4))


def windowed(window: int = 4, full: tuple[ArraySpec, ...] = (FULL,)) -> Layout:
    return Layout(full, (HIDDEN,), SLIDING, window)


def test_a_window_row_takes_as_many_slots_as_full_rows_would() -> None:
    layout = windowed()
    assert (layout.slot_bytes, layout.bytes_per_token, layout.bytes_per_window_row) == (16, 16, 48)
    assert [page.start for page in layout.window_pages] == [0, 16, 32]
    alone = windowed(full=())
    assert (alone.bytes_per_token, alone.slot_bytes, len(alone.window_pages)) == (0, 48, 1)
    wide = Layout((FULL,), (HIDDEN,), (ArraySpec("w", (10,), torch.float32), ArraySpec("b", (3,), torch.bfloat16)), 2)
    assert wide.slot_bytes == 40, "no array is cut in two"
    assert [page.nbytes for page in wide.window_pages] == [40, 8]


def test_a_layout_with_half_a_window_is_refused() -> None:
    for arrays, window in ((SLIDING, 0), ((), 3)):
        with pytest.raises(ValueError, match="neither"):
            Layout((FULL,), (HIDDEN,), arrays, window)
    with pytest.raises(ValueError, match="twice"):
        Layout((FULL,), (HIDDEN,), (FULL,), 3)


def test_another_window_is_another_layout() -> None:
    names = {windowed(window).fingerprint("w", {}) for window in (3, 4)}
    names |= {windowed(full=()).fingerprint("w", {}), Layout((FULL,), (HIDDEN,)).fingerprint("w", {})}
    assert len(names) == 4


@pytest.mark.parametrize("full", [(FULL,), (), (ArraySpec("layers.0.kv", (1, 9), torch.float32),)])
def test_window_rows_come_back_bit_for_bit(full: tuple[ArraySpec, ...]) -> None:
    layout = windowed(full=full)
    pool = DevicePool(layout, 4000, 1, torch.device("cpu"))
    slots = pool.allocate_window(5)
    assert slots is not None
    rows = torch.randint(0, 256, (5, layout.bytes_per_window_row), dtype=torch.uint8)
    pool.write_window(slots, rows)
    back = torch.zeros_like(rows)
    pool.copy_window(slots, back)
    assert torch.equal(back, rows)
    page, view = pool.window_views["layers.2.kv"]
    place = next(each for each in layout.describe() if each["name"] == "layers.2.kv")["start"]
    assert isinstance(place, int)
    assert torch.equal(view[torch.from_numpy(slots[:, page])].flatten(1).view(torch.uint8), rows[:, place : place + 16])
    pool.free_window(slots)
    assert pool.num_free == pool.num_slots


def digest(tokens: Tokens, position: int) -> bytes:
    """What the window row of a position must hold: it depends on all tokens up to there."""
    return blake3(tokens[: position + 1].tobytes()).digest(16)


class WindowMachine(RuleBasedStateMachine):
    """A tree used as sequences use it, with a tier that is a dictionary. Window rows hold digests of their prefixes."""

    @initialize(window=st.integers(1, 6), slots=st.sampled_from([60, 300]))
    def start(self, window: int, slots: int) -> None:
        array = ArraySpec("w", (4,), torch.int32)
        self.layout = Layout((ArraySpec("kv", (4,), torch.int32),), (HIDDEN,), (array,), window)
        self.pool = DevicePool(self.layout, slots * 16, 1, torch.device("cpu"))
        self.tree = PrefixTree(self.layout, self.pool)
        self.root = self.tree.root(SPACE)
        self.tier: dict[str, torch.Tensor] = {}

    def write(self, slots: np.ndarray, tokens: Tokens, first: int) -> None:
        content = b"".join(digest(tokens, first + i) for i in range(len(slots)))
        rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(len(slots), 16) if content else None
        if rows is not None:
            self.pool.write_window(slots, rows)

    def load(self, node: Node, position: int) -> bool:
        """Bring in what going on from `position` needs. False if there is no room."""
        tree, first = self.tree, self.layout.window_first(position)
        path = path_to(node)
        windows = [(each, part) for each in path if each.end > first for part in each.window_to_load(first)]
        rows = sum(len(each.tokens) for each in path if each.slots is None)
        if not tree.make_room(rows + sum(part[2] - part[1] for _, part in windows)):
            return False
        for each in path:
            if each.slots is None:
                slots = self.pool.allocate(len(each.tokens))
                assert slots is not None
                tree.fill_loaded(each, each.start, slots)
        for each, (saved, begin, end) in windows:
            slots = self.pool.allocate_window(end - begin)
            assert slots is not None
            self.pool.write_window(slots, self.tier[saved.name][begin - saved.start : end - saved.start])
            tree.hold_window(each, begin, slots)
        return True

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), save=st.booleans(), keep=st.booleans())
    def turn(self, tokens: list[int], save: bool, keep: bool) -> None:
        """Resume, check what is there, compute the rest, hand it over, thin, save."""
        tree, wanted = self.tree, as_tokens(tokens)
        match = tree.match(self.root, wanted)
        node, position = tree.node_at(match), match.position
        tree.lease(node)
        if not self.load(node, position):
            tree.release(node)
            return
        first = self.layout.window_first(position)
        held = torch.zeros(position - first, 16, dtype=torch.uint8)
        self.pool.copy_window(tree.window_of(node, first), held)
        for i, row in enumerate(held):
            assert row.numpy().tobytes() == digest(wanted, first + i), f"window row {first + i} is another's"
        rest = len(wanted) - position
        live = min(rest, len(wanted) - self.layout.window_first(len(wanted)))
        if rest and tree.make_room(rest + live + self.pool.slots_per_snapshot):
            slots, window = self.pool.allocate(rest), self.pool.allocate_window(live)
            assert slots is not None
            assert window is not None
            self.write(window, wanted, len(wanted) - live)
            end, _ = tree.extend(node, wanted[position:], slots)
            tree.lease(end)
            tree.release(node)
            tree.hold_window(end, len(wanted) - live, window)
            node = end
            snapshot = self.pool.allocate(self.pool.slots_per_snapshot)
            if keep and snapshot is not None:
                tree.keep_snapshot(node, snapshot)
                for saved in tree.thin(node):
                    self.tier.pop(saved.name, None)
            elif snapshot is not None:
                self.pool.free(snapshot)
        if save:
            self.save(node, wanted)
        tree.release(node)
        for saved in tree.saved.take_forgotten():
            self.tier.pop(saved.name, None)

    def save(self, node: Node, tokens: Tokens) -> None:
        for saved in self.tree.saved.take_forgotten():  # first: what is saved now may go by the same name
            self.tier.pop(saved.name, None)
        context = PrefixContext("model", SPACE, AddressChain(bytes(32), tokens), tokens, None)
        for job in plan_delta(self.tree, node, context):
            name = job.saved.name
            assert name not in self.tier, "saved twice"
            self.tier[name] = torch.zeros(0)
            if job.saved.kind is Kind.WINDOW:
                self.tier[name] = torch.zeros(len(job.slots), 16, dtype=torch.uint8)
                self.pool.copy_window(job.slots, self.tier[name])
                for i, row in enumerate(self.tier[name]):
                    assert row.numpy().tobytes() == digest(tokens, job.saved.start + i), "another's row is saved"
            self.tree.saved.kept(name, "memory")

    @rule(count=st.integers(1, 300))
    def evict(self, count: int) -> None:
        self.tree.make_room(min(count, self.pool.num_slots))

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if self.tier:
            name = data.draw(st.sampled_from(sorted(self.tier)))
            del self.tier[name]
            self.tree.lost(name, "memory")

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "tree"):
            check_integrity(self.tree)
            for saved in self.tree.saved.take_forgotten():
                self.tier.pop(saved.name, None)
            segments = {saved.name: saved for node in self.tree.nodes() for saved in node.windows_saved}
            windows = {name for name in self.tier if name.endswith(".window")}
            assert windows == set(segments), "a tier keeps a window that nobody knows, or lacks one that is known"

    @invariant()
    def once(self) -> None:
        if hasattr(self, "tree"):
            for node in self.tree.nodes():
                held = [position for saved in node.windows_saved for position in range(saved.start, saved.end)]
                assert len(held) == len(set(held)), "a window row lies twice in a tier"


TestWindows = WindowMachine.TestCase
TestWindows.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


def chain(machine: WindowMachine, lengths: list[int]) -> None:
    for length in lengths:
        machine.turn(list(np.random.default_rng(0).integers(0, 1000, length)), save=True, keep=True)
        check_integrity(machine.tree)


def test_a_long_chain_keeps_only_rows_that_are_of_use() -> None:
    """600 tokens in 60 turns, windows of 6: of most snapshots that were kept on the way nothing is left."""
    machine = WindowMachine()
    machine.start(6, 3000)
    chain(machine, list(range(10, 601, 10)))
    kept = [node for node in machine.tree.nodes() if node.snapshot_slots is not None]
    on_device = sum(node.end - node.window_start for node in machine.tree.nodes())
    assert len(kept) < 12
    of_use = {row for node in kept for row in range(machine.layout.window_first(node.end), node.end)}
    assert on_device == len(of_use) <= 7 * len(kept)
    assert sum(len(rows) for name, rows in machine.tier.items() if name.endswith("window")) == len(of_use)
    for node in kept:
        assert node.window_from <= node.end - 6


def test_what_is_of_use() -> None:
    tree = PrefixTree(windowed(), DevicePool(windowed(), 9000, 1, torch.device("cpu")))
    slots = tree.pool.allocate(20)
    assert slots is not None
    node, _ = tree.extend(tree.root(SPACE), as_tokens(range(20)), slots)
    upper = tree.split_at(node, 10)
    tree.split_at(node, 15)
    assert [(each.start, live) for each, live in live_windows(node, tree.layout)] == [(15, 16), (10, 16), (0, 16)]
    tree.keep_snapshot(upper, tree.pool.allocate(tree.pool.slots_per_snapshot))  # type: ignore[arg-type]
    assert [(each.start, live) for each, live in live_windows(node, tree.layout)] == [(15, 16), (10, 16), (0, 6)]
    middle = node.parent
    assert middle is not None
    tree.extend(middle, as_tokens([99]), tree.pool.allocate(1))  # type: ignore[arg-type]
    assert [(each.start, live) for each, live in live_windows(node, tree.layout)] == [(15, 16), (10, 10), (0, 6)]


def test_a_saved_window_is_used_as_far_as_it_goes() -> None:
    node = Node(None, as_tokens(range(20)).tobytes(), 0, SPACE)
    near, far = Saved(Kind.WINDOW, b"n" * 32, 12, 20), Saved(Kind.WINDOW, b"f" * 32, 5, 12)
    node.windows_saved = [near, far]
    assert node.window_from == 20, "no tier keeps them yet"
    far.tiers.add("disk")
    assert node.window_from == 20, "not whole up to the end"
    near.tiers.add("memory")
    assert node.window_from == 5
    assert node.window_to_load(9) == [(near, 12, 20), (far, 9, 12)]
    node.window = np.zeros((6, 1), dtype=np.int64)
    assert node.window_to_load(13) == [(near, 13, 14)]
    assert node.window_to_load(14) == []


def test_the_same_window_rows_are_not_known_under_two_names() -> None:
    tree = PrefixTree(windowed(), DevicePool(windowed(), 9000, 1, torch.device("cpu")))
    slots = tree.pool.allocate(16)
    assert slots is not None
    node, _ = tree.extend(tree.root(SPACE), as_tokens(range(16)), slots)
    own, other = Saved(Kind.WINDOW, b"o" * 32, 15, 16), Saved(Kind.WINDOW, b"x" * 32, 12, 16)
    tree.saved.register(own, [node])
    tree.saved.kept(own.name, "memory")
    own.pending = 1
    assert not tree.learn(node, other, "disk"), "it is being read or written"
    assert node.windows_saved == [own]
    own.pending = 0
    assert tree.learn(node, other, "disk")
    assert node.windows_saved == [other]
    assert tree.saved.take_forgotten() == [own], "tiers are to remove it before they take the other"

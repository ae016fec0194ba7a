"""The prefix tree against a naive one: whatever happens in whatever order, it is exact and loses nothing."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from holdover.state.address import as_tokens
from holdover.state.integrity import check_integrity
from holdover.state.layout import LAST_HIDDEN, ArraySpec, Layout
from holdover.state.node import Match, Node, Saved, common_length, path_to
from holdover.state.pool import DevicePool
from holdover.state.segment import Kind
from holdover.state.tree import PrefixTree

SPACE, OTHER = bytes(32), bytes([1]) * 32
HYBRID = Layout(
    (ArraySpec("latent", (8,), torch.float32),),
    (ArraySpec("recurrent", (16,), torch.float32), ArraySpec(LAST_HIDDEN, (4,), torch.float32)),
)
DENSE = Layout((ArraySpec("kv", (8,), torch.float32),), (ArraySpec(LAST_HIDDEN, (4,), torch.float32),))
# Few token ids and short sequences, so that prefixes are shared, left and met again all the time.
SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def make(layout: Layout = HYBRID, slots: int = 200) -> PrefixTree:
    pool = DevicePool(layout, slots * 32, 1, torch.device("cpu"))
    return PrefixTree(layout, pool)


def publish(tree: PrefixTree, tokens: list[int], snapshot: bool = True, space: bytes = SPACE) -> Node:
    """What a sequence does: resume, compute the rest, hand it over, keep a snapshot at the end."""
    wanted = as_tokens(tokens)
    match = tree.match(tree.root(space), wanted)
    node = tree.node_at(match)
    tree.lease(node)
    assert tree.make_room(len(tokens) - match.position + tree.pool.slots_per_snapshot)
    slots = tree.pool.allocate(len(tokens) - match.position)
    assert slots is not None
    end, _ = tree.extend(node, wanted[match.position :], slots)
    if snapshot:
        kept = tree.pool.allocate(tree.pool.slots_per_snapshot)
        assert kept is not None
        tree.keep_snapshot(end, kept)
    tree.release(node)
    return end


def test_two_agents_share_560_of_1946_tokens_and_the_second_pays_once() -> None:
    tree = make(slots=8000)
    shared = list(range(560))
    publish(tree, [*shared, *range(1000, 2386)])
    second = as_tokens([*shared, *range(3000, 4386)])
    match = tree.match(tree.root(SPACE), second)
    assert (match.known, match.position) == (560, 0), "known to 560, but no state to resume from there yet"
    publish(tree, second[:560].tolist())  # the second stops at the branch point
    third = as_tokens([*shared, *range(5000, 6386)])
    assert tree.match(tree.root(SPACE), third).position == 560
    check_integrity(tree)


def test_a_dense_model_resumes_at_any_token() -> None:
    tree = make(DENSE)
    publish(tree, [1, 2, 3, 4, 5], snapshot=False)
    root = tree.root(SPACE)
    assert tree.match(root, as_tokens([1, 2, 3, 9])).position == 3
    assert tree.match(root, as_tokens([1, 2, 3])).position == 2, "the last token is fed for its hidden vector"
    assert tree.match(root, as_tokens([1, 2, 3, 4, 5])).position == 4
    publish(tree, [1, 2, 3, 4, 5])
    assert tree.match(root, as_tokens([1, 2, 3, 4, 5])).position == 5, "now its hidden vector is known"


def test_another_tenants_prefix_is_never_found() -> None:
    tree = make()
    publish(tree, [1, 2, 3])
    assert tree.match(tree.root(OTHER), as_tokens([1, 2, 3])) == Match(0, 0, tree.root(OTHER))


def test_a_mismatch_erases_nothing() -> None:
    tree = make()
    publish(tree, [1, 2, 3, 4])
    tree.match(tree.root(SPACE), as_tokens([1, 2, 9, 9]))
    assert tree.match(tree.root(SPACE), as_tokens([1, 2, 3, 4])).position == 4


def test_what_is_leased_is_not_evicted() -> None:
    tree = make(slots=40)
    node = publish(tree, [1, 2, 3, 4])
    tree.lease(node)
    assert not tree.make_room(tree.pool.num_slots)
    assert tree.match(tree.root(SPACE), as_tokens([1, 2, 3, 4])).known == 4
    tree.release(node)
    assert tree.make_room(tree.pool.num_slots)
    assert tree.match(tree.root(SPACE), as_tokens([1, 2, 3, 4])).known == 0


def test_a_lease_given_back_twice_is_noticed() -> None:
    tree = make()
    node = publish(tree, [1, 2])
    tree.lease(node)
    tree.release(node)
    with pytest.raises(AssertionError, match="twice"):
        tree.release(node)


def test_a_split_moves_no_bytes_and_keeps_what_is_saved() -> None:
    tree = make()
    node = publish(tree, [1, 2, 3, 4])
    saved = Saved(Kind.ROWS, b"a" * 32, 0, 4)
    tree.saved.register(saved, [node])
    tree.saved.kept(saved.name, "memory")
    before = tree.slots_of(node).tolist()
    upper = tree.split_at(node, 2)
    assert (upper.start, upper.end, node.start, node.end) == (0, 2, 2, 4)
    assert tree.slots_of(node).tolist() == before
    assert upper.rows is saved
    assert node.rows is saved
    check_integrity(tree)
    tree.lost(saved.name, "memory")
    assert upper.rows is None
    assert node.rows is None


def test_what_is_being_saved_is_not_forgotten_when_a_tier_evicts_it_meanwhile() -> None:
    """Kept by a near tier, evicted there for something else, while the copy into a far tier is still under way."""
    tree = make()
    node = publish(tree, [1, 2, 3, 4])
    saved = Saved(Kind.ROWS, b"a" * 32, 0, 4)
    tree.saved.register(saved, [node])
    saved.pending = 1
    tree.lost(saved.name, "memory")
    assert node.rows is saved, "or the next turn would save it again"
    saved.pending = 0
    tree.lost(saved.name, "memory")
    assert node.rows is None


def test_rows_that_left_the_device_are_found_in_a_tier() -> None:
    tree = make(slots=40)
    node = publish(tree, [1, 2, 3])
    for saved in (Saved(Kind.ROWS, b"r" * 32, 0, 3), Saved(Kind.SNAPSHOT, b"s" * 32, 3, 3)):
        tree.saved.register(saved, [node])
        tree.saved.kept(saved.name, "memory")
    tree.make_room(tree.pool.num_slots)
    assert node.slots is None
    assert tree.match(tree.root(SPACE), as_tokens([1, 2, 3])).position == 3
    tree.lost("73" * 32 + ".snapshot", "memory")
    assert tree.match(tree.root(SPACE), as_tokens([1, 2, 3])).position == 0, "rows without a snapshot are no state"


class TreeMachine(RuleBasedStateMachine):
    """Publishes, leases, evicts, saves, loses and thins at random; a set of prefixes is the oracle."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.tree = make(slots=120)
        self.ever: set[tuple[int, ...]] = set()
        self.serial = 0

    @rule(tokens=SEQUENCES, snapshot=st.booleans())
    def publish(self, tokens: list[int], snapshot: bool) -> None:
        if self.tree.pool.num_free + self.tree.evictable_slots() < len(tokens) + 2 * self.tree.pool.slots_per_snapshot:
            return
        publish(self.tree, tokens, snapshot)
        self.ever.update(tuple(tokens[: i + 1]) for i in range(len(tokens)))
        found = self.tree.match(self.tree.root(SPACE), as_tokens(tokens))
        assert found.known == len(tokens)
        if snapshot:
            assert found.position == len(tokens)

    @rule(target=leases, tokens=SEQUENCES)
    def lease(self, tokens: list[int]) -> object:
        match = self.tree.match(self.tree.root(SPACE), as_tokens(tokens))
        node = self.tree.node_at(match)
        if any(each.slots is None for each in path_to(node)):
            return multiple()
        self.tree.lease(node)
        return node, self.tree.slots_of(node).tolist()

    @rule(lease=consumes(leases))
    def release(self, lease: tuple[Node, list[int]]) -> None:
        node, slots = lease
        assert self.tree.slots_of(node).tolist() == slots, "leased rows have moved or gone"
        self.tree.release(node)

    @rule(count=st.integers(1, 120))
    def evict(self, count: int) -> None:
        possible = self.tree.pool.num_free + self.tree.evictable_slots()
        assert self.tree.make_room(count) == (possible >= count)

    @rule(tokens=SEQUENCES)
    def match(self, tokens: list[int]) -> None:
        match = self.tree.match(self.tree.root(SPACE), as_tokens(tokens))
        assert match.position <= match.known <= len(tokens)
        if match.known:
            assert tuple(tokens[: match.known]) in self.ever, "known, though nobody ever computed it"

    @rule(tokens=SEQUENCES)
    def save(self, tokens: list[int]) -> None:
        node = self.tree.node_at(self.tree.match(self.tree.root(SPACE), as_tokens(tokens)))
        for each in path_to(node):
            if each.rows is None and each.slots is not None:
                self.serial += 1
                saved = Saved(Kind.ROWS, self.serial.to_bytes(32, "big"), each.start, each.end)
                self.tree.saved.register(saved, [each])
                self.tree.saved.kept(saved.name, "memory")

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        names = sorted({each.rows.name for each in self.tree.nodes() if each.rows is not None})
        if names:
            self.tree.lost(data.draw(st.sampled_from(names)), "memory")

    @rule(tokens=SEQUENCES)
    def thin(self, tokens: list[int]) -> None:
        node = self.tree.node_at(self.tree.match(self.tree.root(SPACE), as_tokens(tokens)))
        self.tree.thin(node)

    @invariant()
    def whole(self) -> None:
        check_integrity(self.tree)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_common_length() -> None:
    pairs = [
        ([], [], 0),
        ([1], [], 0),
        ([1, 2], [1, 2], 2),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [1, 9, 3], 1),
        ([5], [6], 0),
    ]
    for a, b, expected in pairs:
        assert common_length(as_tokens(a), as_tokens(b)) == expected == common_length(as_tokens(b), as_tokens(a))
    assert isinstance(common_length(np.arange(3), np.arange(3)), int)

"""A tier that cannot be read for a while: what it keeps is not loaded, not saved twice, and not forgotten."""

import numpy as np
import pytest

from holdover.state.address import as_tokens
from holdover.state.integrity import check_integrity
from holdover.state.node import Node, Saved
from holdover.state.saved import MOST_READ_FAILURES
from holdover.state.segment import Kind
from holdover.state.tree import PrefixTree
from holdover.store.jobs import PrefixContext
from holdover.store.planning import plan_delta
from tests.state.test_tree import SPACE, make, publish

TOKENS = [1, 2, 3, 4]


def saved_tree() -> tuple[PrefixTree, Node]:
    """Four tokens that one tier keeps, and the device no longer."""
    tree = make(slots=40)
    node = publish(tree, TOKENS)
    for saved in (Saved(Kind.ROWS, b"r" * 32, 0, 4), Saved(Kind.SNAPSHOT, b"s" * 32, 4, 4)):
        tree.saved.register(saved, [node])
        tree.saved.kept(saved.name, "objects")
    tree.make_room(tree.pool.num_slots)
    return tree, node


def position(tree: PrefixTree) -> int:
    return tree.match(tree.root(SPACE), as_tokens(TOKENS)).position


def test_it_is_known_again_when_the_tier_works_again() -> None:
    tree, node = saved_tree()
    assert position(tree) == 4
    assert node.rows is not None
    tree.unreachable(node.rows.name, "objects")
    assert position(tree) == 0, "not loaded from there for now"
    publish(tree, TOKENS)
    check_integrity(tree)
    context = PrefixContext("model", SPACE, None, np.array(TOKENS), None)  # type: ignore[arg-type]
    assert not plan_delta(tree, node, context), "and not saved there a second time"
    tree.make_room(tree.pool.num_slots)
    tree.saved.reachable("memory")
    assert position(tree) == 0
    tree.saved.reachable("objects")
    assert position(tree) == 4
    tree.saved.reachable("objects")
    check_integrity(tree)


def test_what_can_never_be_read_is_given_up() -> None:
    tree, node = saved_tree()
    assert node.rows is not None
    name = node.rows.name
    for _ in range(MOST_READ_FAILURES):
        tree.unreachable(name, "objects")
        tree.saved.reachable("objects")
    assert tree.saved.find(name) is None
    assert position(tree) == 0
    tree.unreachable("unknown.rows", "objects")
    check_integrity(tree)


def test_a_tier_can_evict_what_it_could_not_be_read_for() -> None:
    tree, node = saved_tree()
    assert node.rows is not None
    name = node.rows.name
    tree.unreachable(name, "objects")
    tree.lost(name, "objects")
    assert tree.saved.find(name) is None
    check_integrity(tree)


def test_a_snapshot_lease_given_back_twice_is_noticed() -> None:
    tree = make()
    node = publish(tree, [1, 2])
    tree.lease_snapshot(node)
    assert tree.evictable_slots() == 2, "the rows, not the snapshot"
    tree.release_snapshot(node)
    with pytest.raises(AssertionError, match="twice"):
        tree.release_snapshot(node)


def test_the_queues_do_not_grow_without_bound() -> None:
    tree = make()
    node = publish(tree, [1, 2, 3])
    for _ in range(1000):
        tree.lease(node)
        tree.release(node)
    assert len(tree._order.leaves) < 80
    check_integrity(tree)
    assert tree.make_room(tree.pool.num_slots)

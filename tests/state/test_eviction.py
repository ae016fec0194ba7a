"""What goes first: what saves least for its bytes and its age; nothing that could go is ever forgotten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdover.state.address import as_tokens
from holdover.state.eviction import EvictionQueue
from holdover.state.integrity import check_integrity
from holdover.state.node import Node
from holdover.state.policy import eviction_rank
from tests.state.test_tree import DENSE, SPACE, make, publish

COUNTS = st.integers(1, 10**6)


def rank(last_used: int = 0, saved: int = 100, slots: int = 10, horizon: int = 50, superseded: bool = False) -> float:
    return eviction_rank(
        last_used=last_used, saved_tokens=saved, slots=slots, horizon=horizon, superseded=superseded
    )  # fmt: skip


@given(st.integers(0, 10**9), COUNTS, COUNTS, COUNTS)
def test_more_saved_fewer_bytes_and_later_use_are_worth_more(used: int, saved: int, slots: int, horizon: int) -> None:
    here = rank(used, saved, slots, horizon)
    assert rank(used + 1, saved, slots, horizon) > here
    assert rank(used, 2 * saved, slots, horizon) > here
    assert rank(used, saved, 2 * slots, horizon) < here
    assert rank(used, saved, slots, horizon, superseded=True) < here


@given(st.integers(0, 10**6), st.integers(1, 1000), COUNTS, COUNTS)
def test_twice_the_tokens_are_worth_one_horizon_of_age(used: int, horizon: int, saved: int, slots: int) -> None:
    gained = rank(used, 2 * saved, slots, horizon) - rank(used, saved, slots, horizon)
    assert gained == pytest.approx(horizon, abs=1e-3)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.booleans()), max_size=300))
def test_the_queue_gives_the_least_of_all_candidates(changes: list[tuple[int, int, bool]]) -> None:
    """Against a plain search, with ranks that rise and candidates that come and go."""
    nodes = [Node(None, as_tokens([i]).tobytes(), 0, SPACE) for i in range(6)]
    worth = dict.fromkeys(nodes, 0)
    candidates: set[Node] = set()
    queue = EvictionQueue(candidates.__contains__, lambda node: float(worth[node]))
    for index, rise, candidate in changes:
        node = nodes[index]
        worth[node] += rise
        if not candidate:
            candidates.discard(node)
        elif node not in candidates:
            candidates.add(node)
            queue.add(node)
        first = queue.first()
        assert (first is None) == (not candidates)
        if first is not None:
            assert first[0] == min(worth[each] for each in candidates) == worth[first[1]]
            assert first[1] in candidates
        assert candidates <= queue.nodes()
        assert len(queue) <= 64 + 4 * len(nodes) + 1


def test_models_that_resume_anywhere_let_the_least_recently_used_rows_go() -> None:
    tree = make(DENSE, slots=40)
    old, new = publish(tree, [1, 2, 3, 4, 5, 6]), publish(tree, [7, 8])
    tree.lease(old)
    tree.release(old)
    assert tree.make_room(tree.pool.num_free + 2)
    assert new.slots is None
    assert old.slots is not None
    check_integrity(tree)


def test_a_short_side_request_goes_before_an_older_long_chain() -> None:
    """Age alone would let the long one go, which saves a hundred times as much."""
    tree = make(slots=600)
    long = publish(tree, list(range(100, 300)))
    short = publish(tree, [5, 6])
    assert tree.make_room(tree.pool.num_free + 1)
    assert short.slots is None
    assert short.snapshot_slots is None
    assert long.snapshot_slots is not None
    check_integrity(tree)


def test_a_superseded_snapshot_goes_before_the_rows_of_another() -> None:
    tree = make(slots=600)
    first = publish(tree, list(range(100, 200)))
    publish(tree, list(range(100, 240)))
    other = publish(tree, [5, 6, 7])
    assert first.superseded
    assert tree.make_room(tree.pool.num_free + 1)
    assert first.snapshot_slots is None
    assert first.slots is not None
    assert other.slots is not None
    check_integrity(tree)


def test_what_has_ended_goes_at_last() -> None:
    """A long chain that nobody comes back to is not kept for ever: each use of the others makes it older."""
    tree = make(slots=500)
    ended = publish(tree, list(range(1000, 1100)))
    for turn in range(2000):
        publish(tree, [*range(20), 100 + turn % 50])
        tree.make_room(300)
        if ended.snapshot_slots is None:
            break
    assert ended.snapshot_slots is None
    check_integrity(tree)

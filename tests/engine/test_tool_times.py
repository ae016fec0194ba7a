"""State of a session that is likely to come back soon comes up the tiers before it does."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdover.engine.tool_times import GIVE_UP_AFTER, LEAD_SECONDS, MOST_SESSIONS, Away, ToolTimes, expected_seconds
from holdover.models.oracle import Oracle
from holdover.state.node import Node
from holdover.store.memory import MemoryTier
from holdover.store.objects import disk_tier
from tests.engine.harness import Bench


def node() -> Node:
    return Node(None, b"", 0, bytes(32))


def test_a_guess_needs_two_calls_and_takes_the_shorter_of_them() -> None:
    assert expected_seconds(()) is None
    assert expected_seconds((5.0,)) is None
    assert expected_seconds((5.0, 9.0)) == 5.0
    assert expected_seconds((1.0, 60.0, 50.0, 40.0, 55.0)) == 40.0


@given(st.lists(st.floats(0.0, 1e5), min_size=2, max_size=8), st.floats(0.0, 1e6))
def test_who_is_away_is_named_from_a_moment_before_it_comes(calls: list[float], since: float) -> None:
    times, end = ToolTimes(), node()
    times.leaves(end, Away(end, since, tuple(calls)))
    expected = expected_seconds(tuple(calls))
    first = times.next_due()
    assert first == pytest.approx(since + max(0.0, expected - LEAD_SECONDS))
    assert not times.due(first - 1.0)
    named = 0
    while (moment := times.next_due()) is not None:
        named += len(times.due(moment))
        assert named < 100
    assert moment is None and named >= 1
    times.leaves(end, Away(end, since, tuple(calls)))
    assert times.comes_back(end, since + 7.0)[-1] == pytest.approx(7.0)
    assert times.due(since + 2 * GIVE_UP_AFTER * expected + 10.0) == [], "it has come"
    assert len(times) == 0


def test_no_more_sessions_are_remembered_than_it_says() -> None:
    times, ends = ToolTimes(), [node() for _ in range(MOST_SESSIONS + 5)]
    for end in ends:
        times.leaves(end, Away(end, 0.0, ()))
    assert len(times) == MOST_SESSIONS
    assert times.comes_back(ends[0], 1.0) == ()
    assert times.comes_back(ends[-1], 1.0) == (1.0,)


@pytest.mark.parametrize("kind", ["hybrid", "dense", "everything"])
@pytest.mark.parametrize("returned", [True, False])
def test_state_waits_in_memory_for_who_is_about_to_return(kind: str, returned: bool, tmp_path: Path) -> None:
    """Three turns with ten seconds between them; then others push its state out of the device and out of memory."""
    now = [0.0]
    layout = Oracle(kind).layout
    memory = MemoryTier(16 * (200 * layout.bytes_per_token + 40_000))
    bench = Bench(Oracle(kind), device_bytes=1 << 20, tiers=(memory, disk_tier(tmp_path, 64 << 20)), find_from=1000)
    bench.store._clock = lambda: now[0]
    chance = random.Random(kind)
    history = chance.choices(range(256), k=60)
    for _ in range(3):
        answer = bench.ask(history, 3)
        history = [*history, *(answer if returned else [7, 7, 7]), *chance.choices(range(256), k=10)]
        now[0] += 10.0
    now[0] -= 10.0
    bench.tree.make_room(bench.pool.num_slots)
    for saved in list(bench.tree.saved.all()):  # memory has had to make room for others
        memory.delete(saved.name)
        bench.engine.exchange._forget(saved.name, "memory")
    promoted = bench.engine.counters.tiers["memory"].segments_promoted
    now[0] += 7.9
    bench.step()
    assert bench.engine.counters.tiers["memory"].segments_promoted == promoted == 0
    assert bench.engine.wakes_at() == pytest.approx(now[0] + 0.1)
    now[0] += 0.1
    bench.step()
    bench.run()
    bench.step()
    assert bench.engine.counters.tiers["memory"].segments_promoted > 0
    now[0] += 2.0
    assert bench.ask(history, 3) == Bench(Oracle(kind)).ask(history, 3)
    counters = bench.engine.counters.tiers
    assert counters["memory"].tokens_loaded >= 60
    assert counters["disk"].tokens_loaded == 0
    assert {audit.max_copies for audit in bench.engine.exchange.audits.values()} == {1}


def test_what_is_on_the_device_or_unknown_is_not_promoted(tmp_path: Path) -> None:
    now = [0.0]
    bench = Bench(Oracle("hybrid"), tiers=(MemoryTier(1 << 20), disk_tier(tmp_path, 64 << 20)), find_from=1000)
    bench.store._clock = lambda: now[0]
    history = random.Random(1).choices(range(256), k=60)
    for _ in range(4):
        history = [*history, *bench.ask(history, 3), 1, 2, 3]
        now[0] += 10.0
    bench.step()
    assert bench.engine.counters.tiers["memory"].segments_promoted == 0

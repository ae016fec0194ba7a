"""When a turn is saved: at its end, or when its room is wanted; and when saved state is computed again all the same."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdover.config import SaveMode
from holdover.engine.deferred import Saving
from holdover.engine.rates import LEAST_OBSERVATIONS, TRY_EVERY, LoadOrCompute, Rate
from holdover.models.oracle import Oracle
from holdover.store.memory import MemoryTier
from holdover.store.objects import disk_tier
from tests.engine.harness import Bench

KINDS = ["hybrid", "dense", "recurrent", "mixed", "sliding", "everything"]


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def talk(bench: Bench, seed: int, turns: int = 4) -> list[int]:
    history = tokens(seed, 60)
    for turn in range(turns):
        history = [*history, *bench.ask(history, 3), *tokens(seed * 100 + turn, 20)]
    return history


@pytest.mark.parametrize("kind", KINDS)
def test_lazy_saves_a_session_once_when_its_room_is_wanted(kind: str) -> None:
    saved: dict[SaveMode, int] = {}
    for mode in SaveMode:
        memory = MemoryTier(64 << 20)
        bench = Bench(Oracle(kind), device_bytes=1 << 20, tiers=(memory,), saving=Saving(mode=mode))
        talk(bench, 1)
        if mode is SaveMode.LAZY:
            assert (memory.used_bytes(), len(bench.engine.exchange.deferred)) == (0, 1)
            assert bench.tree.num_leases() > 0
        bench.engine.exchange.save_all()
        bench.run()
        bench.step()
        assert bench.tree.num_leases() == 0
        assert bench.engine.exchange.audits["memory"].max_copies <= 1
        saved[mode] = bench.engine.counters.tiers["memory"].bytes_saved
    assert saved[SaveMode.EAGER] == saved[SaveMode.AUTO] >= saved[SaveMode.LAZY] > 0
    if kind in ("hybrid", "recurrent", "everything"):
        assert saved[SaveMode.LAZY] < saved[SaveMode.EAGER], "snapshots that were superseded before were saved"


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_to_be_saved_is_never_lost(kind: str) -> None:
    """More sessions than the device holds: all of them come back from the tier, as they would have from the device."""
    pool = Bench(Oracle(kind), device_bytes=1 << 20).pool
    slots = {"recurrent": 10, "sliding": 300}.get(kind, 700)
    memory = MemoryTier(64 << 20)
    bench = Bench(
        Oracle(kind), device_bytes=slots * pool.slot_bytes + 4 * pool.live_bytes, tiers=(memory,), max_running=2,
        saving=Saving(mode=SaveMode.LAZY),
    )  # fmt: skip
    histories = [talk(bench, seed, 2) for seed in range(1, 9)]
    assert bench.engine.counters.tiers["memory"].segments_saved > 0, "nothing has asked for room"
    for history in histories:
        assert bench.ask(history, 2) == Bench(Oracle(kind)).ask(history, 2)
        assert bench.usage(bench.last()).cached_tokens >= len(history) - 40
    assert bench.engine.counters.requests_failed == 0


def test_lazy_waits_no_longer_than_it_says() -> None:
    now = [0.0]
    memory = MemoryTier(64 << 20)
    bench = Bench(Oracle("hybrid"), tiers=(memory,), saving=Saving(mode=SaveMode.LAZY, wait_seconds=30.0))
    bench.store._clock = lambda: now[0]
    bench.ask(tokens(1, 50))
    now[0] = 29.9
    bench.step()
    assert memory.used_bytes() == 0
    now[0] = 30.0
    bench.step()
    bench.run()
    assert memory.used_bytes() > 0
    bench.step()
    assert bench.tree.num_leases() == 0


def test_auto_leaves_out_what_is_superseded_while_the_tiers_are_busy() -> None:
    """With a backlog the end of each turn waits; when the tiers have caught up, only the newest is saved."""
    jobs: list[Callable[[], None]] = []

    class SlowWorker:
        def __init__(self, name: str, run: Callable[..., None]) -> None:
            self.run = run

        def submit(self, job: object) -> None:
            jobs.append(lambda: self.run(job))

        def close(self) -> None: ...

    memory = MemoryTier(64 << 20)
    bench = Bench(Oracle("hybrid"), tiers=(memory,), saving=Saving(mode=SaveMode.AUTO, backlog_bytes=1))
    bench.store._saver = SlowWorker("save", bench.store._write)

    def finish(history: list[int]) -> list[int]:
        request = bench.submit(history, 3)
        while not any(out.finish_reason for out in bench.outputs[request]):
            bench.step()
        return [*history, *bench.tokens(request), *tokens(len(history), 20)]

    history = finish(tokens(1, 50))
    under_way = bench.engine.exchange.saves_under_way
    assert under_way == len(jobs) > 0
    for _ in range(3):
        history = finish(history)
    assert bench.engine.exchange.saves_under_way == under_way
    assert len(bench.engine.exchange.deferred) == 1
    while jobs:
        jobs.pop(0)()
        bench.step()
    assert len(bench.engine.exchange.deferred) == 0
    assert bench.tree.num_leases() == 0
    kept = [saved for saved in bench.tree.saved.all() if saved.name.endswith(".snapshot")]
    assert len(kept) < 8, "two for each of the four turns"


# Load or compute


@given(st.floats(0.0, 5.0), st.floats(1e-9, 1.0), st.lists(st.integers(1, 10**6), min_size=LEAST_OBSERVATIONS))
def test_a_rate_finds_what_lies_behind_its_observations(fixed: float, each: float, amounts: list[int]) -> None:
    rate = Rate()
    for amount in amounts:
        rate.observe(amount, fixed + each * amount)
    for amount in amounts:
        assert rate.estimate(amount) == pytest.approx(fixed + each * amount, rel=0.05, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0.0, 1e4)), max_size=40), st.integers(0, 10**9))
def test_no_observation_makes_an_estimate_absurd(observed: list[tuple[int, float]], amount: int) -> None:
    rate = Rate()
    for each, seconds in observed:
        rate.observe(each, seconds)
    estimate = rate.estimate(amount)
    assert estimate is None or estimate >= 0.0
    assert estimate is not None or len(observed) < LEAST_OBSERVATIONS or not any(each for each, _ in observed)


def test_what_is_not_known_is_loaded_and_what_seems_slow_is_tried_now_and_then() -> None:
    rates = LoadOrCompute()
    assert rates.loading_pays({"disk": 1000}, 100, 64)
    for size in (10, 20, 40, 64):
        rates.computed(size, size * 1e-3)
        rates.loaded({"disk": size * 1000}, 1.0 + size * 1e-3)
    assert rates.seconds_to_compute(100, 64) == pytest.approx(0.1)
    assert rates.seconds_to_load({"disk": 10_000}) == pytest.approx(1.01)
    assert rates.loading_pays({"memory": 1000}, 1, 64), "another tier"
    assert rates.loading_pays({"disk": 10_000}, 2000, 64)
    decisions = [rates.loading_pays({"disk": 10_000}, 100, 64) for _ in range(2 * TRY_EVERY)]
    assert decisions.count(True) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_where_loading_would_take_longer_it_is_computed(kind: str, tmp_path: Path) -> None:
    """A second engine finds all that the first has saved, computes it all the same, and saves nothing twice."""
    history = talk(Bench(Oracle(kind), tiers=(disk_tier(tmp_path, 64 << 20),), find_from=1), 1)
    bench = Bench(Oracle(kind), tiers=(disk_tier(tmp_path, 64 << 20),), find_from=1)
    bench.engine.scheduler.loading_pays = lambda *_: False
    assert bench.ask(history, 3) == Bench(Oracle(kind)).ask(history, 3)
    usage, counters = bench.usage(bench.last()), bench.engine.counters.tiers["disk"]
    assert (usage.cached_tokens, usage.computed) == (0, len(history))
    assert counters.segments_found > 0
    assert (counters.tokens_loaded, counters.bytes_loaded) == (0, 0)
    assert bench.engine.statistics(0).counters["tokens_computed_not_loaded"] > 0
    bench.engine.scheduler.loading_pays = lambda *_: True
    again = Bench(Oracle(kind), tiers=(disk_tier(tmp_path, 64 << 20),), find_from=1)
    again.ask(history, 3)
    assert again.usage(again.last()).cached_tokens >= len(history) - 1

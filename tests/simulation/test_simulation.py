"""The laws hold in simulated worlds, and the simulator notices when they don't."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdover.models.oracle import Oracle
from holdover.state.tree import PrefixTree
from tests.simulation.check import failure_of, kind_of
from tests.simulation.scenario import make_scenario
from tests.simulation.shrink import KEPT, keep, load, shrink
from tests.simulation.world import simulate

SEEDS = range(400)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(SEEDS.start, SEEDS.stop, 50))
def test_no_law_is_broken(first: int) -> None:
    for seed in range(first, first + 50):
        failure = failure_of(make_scenario(seed))
        assert failure is None, f"seed {seed}: {failure} (python -m tests.simulation --trace --seed {seed})"


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.json")), ids=lambda path: path.stem)
def test_what_failed_once_does_not_fail_again(path: Path) -> None:
    assert failure_of(load(path)) is None


def test_a_seed_runs_the_same_way_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    stories = []
    for _ in range(2):
        simulate(make_scenario(17), story=True)
        stories.append(capsys.readouterr().out)
    assert stories[0] == stories[1]
    assert "has its answer" in stories[0]


def test_the_scenarios_meet_everything_that_they_should() -> None:
    """A simulator that never preempts, loads or loses anything proves nothing."""
    scenarios = [make_scenario(seed) for seed in range(150)]
    worlds = [simulate(scenario) for scenario in scenarios]
    hosts = [host for world in worlds for host in world.hosts if host.alive]
    counters = [host.engine.counters for host in hosts]
    assert {fault.kind for scenario in scenarios for fault in scenario.faults} == {
        "error", "readonly", "crash", "flip", "truncate", "foreign", "missing", "slow", "hang", "vanish", "kill",
    }  # fmt: skip
    assert sum(host.engine.scheduler.num_preemptions for host in hosts) > 10
    assert sum(each.loads_failed for each in counters) > 10
    assert sum(each.requests_cancelled for each in counters) > 10
    assert sum(tier.tokens_loaded for each in counters for tier in each.tiers.values()) > 1000
    assert sum(sum(host.store.damaged.values()) for host in hosts) > 10
    assert sum(tier.segments_evicted for each in counters for tier in each.tiers.values()) > 100
    assert sum(host.tree.num_evicted_tokens for host in hosts) > 1000
    assert sum(host.life > 1 for host in hosts) > 5


def test_a_fault_is_found_shrunk_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A lease that is skipped, as the mutation check plants it."""
    monkeypatch.setattr(PrefixTree, "lease", lambda self, node: self._touch(node))
    seed, failure = next((seed, f) for seed in SEEDS if (f := failure_of(make_scenario(seed))) is not None)
    kind = kind_of(failure)
    scenario = make_scenario(seed)
    small = shrink(scenario, lambda each: kind_of(failure_of(each)) == kind, most_tries=60)
    assert failure_of(small) is not None
    assert sum(len(session.turns) for session in small.sessions) <= sum(len(s.turns) for s in scenario.sessions)
    kept = load(keep(small, tmp_path))
    assert kept == small
    assert kind_of(failure_of(kept)) == kind
    monkeypatch.undo()
    assert failure_of(kept) is None


def test_a_wrong_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """State of another position: what a snapshot taken one token late would do."""
    feed = Oracle._feed

    def late(self, tokens, table, live_row, pool):
        tokens = tokens.copy()
        if len(tokens) > 40:
            tokens[0] ^= 1
        return feed(self, tokens, table, live_row, pool)

    monkeypatch.setattr(Oracle, "_feed", late)
    failures = [failure_of(make_scenario(seed)) for seed in range(20)]
    assert any(failure is not None and "law 1" in failure for failure in failures)

"""What a waiting request will load comes up the tiers meanwhile."""

import random
from pathlib import Path

import pytest

from holdover.models.oracle import Oracle
from holdover.store.memory import MemoryTier
from holdover.store.objects import disk_tier
from tests.engine.harness import Bench


@pytest.mark.parametrize("kind", ["hybrid", "dense", "mixed", "everything"])
def test_while_a_request_waits_its_state_comes_up_the_tiers(kind: str, tmp_path: Path) -> None:
    """One request at a time: the second waits for the first, and its state is in memory before it is let in."""
    prompts = [random.Random(seed).choices(range(256), k=120) for seed in range(2)]
    Bench(Oracle(kind), tiers=(disk_tier(tmp_path, 16 << 20),), find_from=1).ask(prompts[1], 1)
    memory = MemoryTier(16 << 20)
    bench = Bench(Oracle(kind), tiers=(memory, disk_tier(tmp_path, 16 << 20)), find_from=1, max_running=1)
    first, second = bench.submit(prompts[0], 30), bench.submit([*prompts[1], 5], 4)
    bench.step()
    bench.step()
    assert not bench.tokens(second)
    counters = bench.engine.counters.tiers
    assert counters["memory"].segments_promoted > 0
    bench.run()
    assert bench.tokens(second) == Bench(Oracle(kind)).ask([*prompts[1], 5], 4)
    assert len(bench.tokens(first)) == 30
    assert (counters["memory"].tokens_loaded, counters["disk"].tokens_loaded) == (120, 0)
    assert bench.usage(second).computed == 1
    assert {audit.max_copies for audit in bench.engine.exchange.audits.values()} == {1}


def test_what_is_too_much_for_the_nearest_tier_is_not_promoted_for_a_waiting_request(tmp_path: Path) -> None:
    prompts = [random.Random(seed).choices(range(256), k=120) for seed in range(2)]
    Bench(Oracle("dense"), tiers=(disk_tier(tmp_path, 16 << 20),), find_from=1).ask(prompts[1], 1)
    tiers = (MemoryTier(3 * 120 * Oracle("dense").layout.bytes_per_token), disk_tier(tmp_path, 16 << 20))
    bench = Bench(Oracle("dense"), tiers=tiers, find_from=1, max_running=1)
    bench.submit(prompts[0], 30)
    second = bench.submit([*prompts[1], 5], 4)
    bench.step()
    bench.step()
    assert bench.engine.counters.tiers["memory"].segments_promoted == 0
    bench.run()
    assert bench.tokens(second) == Bench(Oracle("dense")).ask([*prompts[1], 5], 4)

"""Too little memory, damaged segments, clients that go: right answers, nothing leaked, nothing hung."""

import random

import pytest
import torch

from holdover.models.base import Model
from holdover.store.memory import MemoryTier
from holdover.store.queues import Store
from tests.engine.harness import Bench
from tests.engine.test_reuse import device_for, fresh, prompt


def assert_nothing_is_held(bench: Bench) -> None:
    assert bench.tree.num_leases() == 0
    assert len(bench.engine.holdings.held_slots()) == 0
    assert bench.engine.holdings.num_running == 0


def test_more_agents_than_fit_all_get_their_answers(model: Model) -> None:
    tier = MemoryTier(32 << 20)
    bench = Bench(model, device_bytes=device_for(model, 400), tiers=(tier,), max_running=2)
    prompts = [prompt(seed, 100 + seed) for seed in range(12)]
    requests = [bench.submit(tokens, 20) for tokens in prompts]
    bench.run()
    for request, tokens in zip(requests, prompts, strict=True):
        assert bench.tokens(request) == fresh(model, tokens, 20)
    assert_nothing_is_held(bench)


@pytest.mark.parametrize("tiers", [0, 1])
def test_preemption_changes_no_token_and_saves_what_was_computed(model: Model, tiers: int) -> None:
    room = 420
    bench = Bench(
        model,
        device_bytes=device_for(model, room),
        tiers=tuple(MemoryTier(32 << 20) for _ in range(tiers)),
        max_running=3,
    )
    prompts = [prompt(seed, 60) for seed in range(50, 53)]
    requests = [bench.submit(tokens, 150) for tokens in prompts]
    bench.run()
    assert bench.engine.scheduler.num_preemptions > 0
    for request, tokens in zip(requests, prompts, strict=True):
        assert bench.tokens(request) == fresh(model, tokens, 150)
    if tiers:
        assert bench.engine.counters.prompt_tokens_computed == 180, "nothing is computed twice"
    assert_nothing_is_held(bench)


def test_what_others_computed_while_a_request_was_out_of_its_place_counts_as_reused(model: Model) -> None:
    tokens = prompt(57, 90)
    bench = Bench(model, max_batch_tokens=16)
    first = bench.submit([*tokens, *prompt(58, 10)])
    bench.step()
    bench.step()
    (sequence,) = bench.engine.scheduler.running
    assert sequence.position == 32
    bench.engine.scheduler.remove(sequence)
    bench.engine._preempt(sequence)
    bench.engine.scheduler.waiting.remove(sequence)  # another comes first
    bench.ask(tokens)
    bench.engine.scheduler.waiting.append(sequence)
    bench.run()
    usage = bench.usage(first)
    assert (usage.reused, usage.cached_tokens, usage.computed) == ({"device": 58}, 58, 42)
    assert bench.tokens(first) == fresh(model, [*tokens, *prompt(58, 10)], 4)
    assert bench.engine.counters.prompt_tokens_reused_device == 58 + 32


def test_a_request_that_can_never_fit_is_refused_and_others_go_on(model: Model) -> None:
    bench = Bench(model, device_bytes=device_for(model, 200), max_running=2)
    too_long = bench.submit(prompt(1, 900), 10)
    fits = bench.submit(prompt(2, 50), 4)
    bench.run()
    assert "device memory" in bench.failures[too_long].message
    assert len(bench.tokens(fits)) == 4
    assert_nothing_is_held(bench)


def test_a_damaged_segment_is_a_miss_and_is_removed(model: Model) -> None:
    tier = MemoryTier(16 << 20)
    bench = Bench(model, device_bytes=device_for(model, 450), tiers=(tier,), max_running=2)
    tokens = prompt(60, 150)
    bench.ask(tokens)
    for seed in range(61, 66):
        bench.ask(prompt(seed, 180))
    for name in tier.scan():
        with tier.get(name) as buffer:
            assert buffer is not None
            buffer[-1] ^= 1
    longer = [*tokens, 1, 2]
    assert bench.ask(longer) == fresh(model, longer, 4)
    assert bench.engine.counters.loads_failed > 0
    assert bench.store.damaged["memory"] > 0
    assert bench.ask(longer) == fresh(model, longer, 4)
    assert_nothing_is_held(bench)


def test_a_tier_too_small_for_anything_costs_only_recompute(model: Model) -> None:
    bench = Bench(model, device_bytes=device_for(model, 450), tiers=(MemoryTier(2000),), max_running=2)
    for seed in range(70, 74):
        tokens = prompt(seed, 150)
        assert bench.ask(tokens) == fresh(model, tokens, 4)
    assert bench.store.tiers[0].used_bytes() <= 2000
    assert_nothing_is_held(bench)


def test_a_client_that_goes_at_any_step_frees_everything(model: Model) -> None:
    tokens = prompt(80, 150)
    for steps in range(12):
        tier = MemoryTier(16 << 20)
        bench = Bench(model, tiers=(tier,), max_batch_tokens=40)
        bench.ask(tokens[:70])
        request = bench.submit(tokens, 10, n=2)
        for _ in range(steps):
            bench.step()
        bench.engine.cancel(request)
        bench.run()
        assert_nothing_is_held(bench)
        assert bench.ask(tokens) == fresh(model, tokens, 4)


def test_a_cancelled_load_ends_before_its_slots_are_given_away(model: Model) -> None:
    tier = MemoryTier(16 << 20)
    bench = Bench(model, device_bytes=device_for(model, 450), tiers=(tier,), max_running=2)
    tokens = prompt(81, 150)
    bench.ask(tokens)
    for seed in range(82, 86):
        bench.ask(prompt(seed, 180))
    held_back = []
    real_load = bench.store.load
    bench.store.load = held_back.append  # type: ignore[method-assign]
    request = bench.submit([*tokens, 5], 4)
    bench.step()
    assert held_back
    bench.engine.cancel(request)
    bench.step()
    assert bench.engine.holdings.num_running == 1, "the load still writes there"
    bench.store.load = real_load  # type: ignore[method-assign]
    real_load(held_back[0])
    bench.run()
    assert_nothing_is_held(bench)


def test_random_traffic_with_real_threads_gives_the_answers_of_a_fresh_engine(hybrid: Model) -> None:
    rng = random.Random(5)
    tier = MemoryTier(900_000)
    bench = Bench(hybrid, device_bytes=device_for(hybrid, 700), tiers=(tier,), max_running=3)
    bench.store.close()
    bench.store = bench.engine.store = Store(bench.pool, hybrid.fingerprint, [tier], bench.done.append)
    shared = prompt(90, 60)
    histories = [[*shared, *prompt(91 + i, 20)] for i in range(6)]
    for _ in range(5):
        requests = []
        for history in histories:
            history += [rng.randrange(300) for _ in range(rng.randrange(1, 25))]
            requests.append(bench.submit(history, rng.randrange(1, 8)))
        bench.run(limit=20_000)
        for request, history in zip(requests, histories, strict=True):
            assert bench.tokens(request) == fresh(hybrid, history, len(bench.tokens(request)))
            if rng.random() < 0.5:
                history += bench.tokens(request)
        assert tier.used_bytes() <= tier.budget_bytes
    bench.store.close()
    bench.run()
    assert_nothing_is_held(bench)
    assert bench.engine.exchange.audits["memory"].max_copies <= 1


def test_state_bytes_are_the_same_after_save_and_load(hybrid: Model) -> None:
    tier = MemoryTier(16 << 20)
    bench = Bench(hybrid, tiers=(tier,))
    tokens = prompt(95, 77)
    bench.ask(tokens, 1)
    root = next(iter(bench.tree._roots.values()))
    node = bench.tree.match(root, bench.tree._roots and as_tokens(tokens)).node
    rows = bench.pool.read_rows(bench.tree.slots_of(node))
    assert node.snapshot_slots is not None
    snapshot = torch.empty(hybrid.layout.bytes_per_snapshot, dtype=torch.uint8)
    bench.pool.copy_snapshot(node.snapshot_slots, snapshot)
    bench.tree.make_room(bench.pool.num_slots)
    assert node.slots is None
    request = bench.submit([*tokens, 1], 1)
    bench.step()
    bench.step()
    sequence_node = bench.tree.match(root, as_tokens(tokens)).node
    assert torch.equal(bench.pool.read_rows(bench.tree.slots_of(sequence_node)), rows)
    bench.run()
    assert bench.usage(request).reused == {"memory": 77}


def as_tokens(tokens: list[int]):
    from holdover.state.address import as_tokens as convert

    return convert(tokens)

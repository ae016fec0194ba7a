"""What was computed once is not computed again, and the answer is the one that computing from scratch gives."""

import random

import pytest

from holdover.models.base import Model
from holdover.store.memory import MemoryTier
from tests.checkpoints import VOCAB_SIZE
from tests.engine.harness import Bench

SMALL_DEVICE = 230_000


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def fresh(model: Model, tokens: list[int], count: int = 6, **options: object) -> list[int]:
    """The answer of an engine that knows nothing."""
    return Bench(model).ask(tokens, count, **options)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150, 250])
def test_a_repeated_prompt_is_reused_to_the_token(model: Model, length: int) -> None:
    bench = Bench(model)
    tokens = prompt(length, length)
    first = bench.ask(tokens)
    again = bench.ask(tokens)
    assert again == first == fresh(model, tokens, 4)
    assert bench.usage(bench.last()).cached_tokens == length
    assert bench.usage(bench.last()).computed == 0


@pytest.mark.parametrize("length", [2, 64, 150])
def test_one_token_more_computes_one_token(model: Model, length: int) -> None:
    bench = Bench(model)
    tokens = prompt(length, length)
    bench.ask(tokens[:-1])
    assert bench.ask(tokens) == fresh(model, tokens, 4)
    assert bench.usage(bench.last()).computed == 1


@pytest.mark.parametrize("length", [2, 65, 150])
def test_one_token_less_is_right_and_reused_from_the_second_time(model: Model, length: int) -> None:
    bench = Bench(model)
    tokens = prompt(length, length)
    bench.ask(tokens)
    assert bench.ask(tokens[:-1]) == fresh(model, tokens[:-1], 4)
    if model.layout.resumes_anywhere:
        assert bench.usage(bench.last()).computed == 1
    assert bench.ask(tokens[:-1]) == fresh(model, tokens[:-1], 4)
    assert bench.usage(bench.last()).computed == 0


def test_the_second_agent_pays_once_and_the_third_resumes_at_the_branch(model: Model) -> None:
    bench = Bench(model)
    shared = prompt(1, 130)
    agents = [shared + prompt(seed, 60) for seed in (2, 3, 4)]
    for tokens in agents:
        assert bench.ask(tokens) == fresh(model, tokens, 4)
    assert bench.usage(bench.last()).computed == 60
    assert bench.usage(bench.last()).cached_tokens == 130


def test_what_was_generated_is_there_in_the_next_turn(model: Model) -> None:
    bench = Bench(model)
    tokens = prompt(5, 80)
    answer = bench.ask(tokens, 10)
    follow_up = [*tokens, *answer, 7, 8]
    assert bench.ask(follow_up) == fresh(model, follow_up, 4)
    assert bench.usage(bench.last()).computed == 3, "the last generated token, which was never fed, and two new ones"


def test_a_change_in_mid_history_resumes_before_it(model: Model) -> None:
    bench = Bench(model)
    turns = prompt(6, 240)
    for end in (80, 160, 240):
        bench.ask(turns[:end])
    edited = [*turns[:200], *prompt(7, 40)]
    assert bench.ask(edited) == fresh(model, edited, 4)
    assert bench.usage(bench.last()).cached_tokens == (200 if model.layout.resumes_anywhere else 160)
    assert bench.ask(turns) == fresh(model, turns, 4), "the old history is still there"
    assert bench.usage(bench.last()).computed == 0


def test_two_agents_that_start_cold_with_one_prompt_compute_it_once(model: Model) -> None:
    bench = Bench(model)
    shared = prompt(8, 150)
    prompts = [shared + prompt(seed, 10) for seed in range(20, 24)] + [shared]
    requests = [bench.submit(tokens) for tokens in prompts]
    bench.run()
    assert bench.engine.counters.prompt_tokens_computed == 150 + 4 * 10
    for request, tokens in zip(requests, prompts, strict=True):
        assert bench.tokens(request) == fresh(model, tokens, 4)


def test_n_samples_compute_the_prompt_once(model: Model) -> None:
    bench = Bench(model)
    request = bench.submit(prompt(9, 90), 5, n=3, temperature=1.0, seed=4)
    bench.run()
    assert bench.engine.counters.prompt_tokens_computed == 90
    samples = [bench.tokens(request, index) for index in range(3)]
    assert len({tuple(sample) for sample in samples}) == 3


def test_another_salt_shares_nothing(model: Model) -> None:
    bench = Bench(model)
    tokens = prompt(10, 70)
    bench.ask(tokens, salt="one")
    bench.ask(tokens, salt="two")
    assert bench.usage(bench.last()).cached_tokens == 0
    bench.ask(tokens, salt="one")
    assert bench.usage(bench.last()).cached_tokens == 70


def test_state_that_left_the_device_comes_back_from_the_tier(model: Model) -> None:
    tier = MemoryTier(16 << 20)
    bench = Bench(model, device_bytes=device_for(model, 450), tiers=(tier,), max_running=2)
    prompts = [prompt(seed, 180) for seed in range(30, 36)]
    for tokens in prompts:
        bench.ask(tokens)
    for tokens in prompts:
        longer = [*tokens, 1, 2, 3]
        assert bench.ask(longer) == fresh(model, longer, 4)
    assert bench.usage(bench.last()).reused.get("memory", 0) + bench.usage(bench.last()).reused.get("device", 0) == 180
    assert bench.engine.counters.tiers["memory"].tokens_loaded > 500
    assert bench.engine.exchange.audits["memory"].max_copies == 1


def device_for(model: Model, tokens: int) -> int:
    """Device memory that holds about so many tokens besides two live states."""
    return model.layout.bytes_per_token * tokens + 6 * (model.layout.bytes_per_snapshot + model.layout.bytes_per_token)


def test_only_the_delta_is_saved_and_only_once(model: Model) -> None:
    tier = MemoryTier(16 << 20)
    bench = Bench(model, tiers=(tier,))
    tokens = prompt(40, 100)
    bench.ask(tokens, 1)
    before = bench.engine.counters.tiers["memory"].bytes_new_state
    bench.ask([*tokens, *prompt(41, 20)], 1)
    counters = bench.engine.counters.tiers["memory"]
    layout = model.layout
    assert counters.bytes_new_state - before == 20 * layout.bytes_per_token + layout.bytes_per_snapshot
    bench.ask([*tokens, *prompt(41, 20)], 1)
    assert counters.bytes_new_state - before == 20 * layout.bytes_per_token + layout.bytes_per_snapshot
    header_room = counters.segments_saved * 1500 + 4 * 120
    assert counters.bytes_saved <= counters.bytes_new_state + header_room


def test_with_a_tier_attached_and_empty_answers_are_the_same(model: Model) -> None:
    tokens = prompt(42, 120)
    with_tier = Bench(model, tiers=(MemoryTier(1 << 20),)).ask(tokens, 12)
    assert with_tier == fresh(model, tokens, 12)


def test_a_join_of_device_and_tier_is_right_at_every_position(hybrid: Model) -> None:
    tokens = prompt(43, 60)
    for cut in range(1, 60, 7):
        tier = MemoryTier(16 << 20)
        bench = Bench(hybrid, tiers=(tier,))
        bench.ask(tokens[:cut], 1)
        bench.ask(tokens, 1)
        upper = bench.tree.match(bench.tree.root(bench.tree._roots.copy().popitem()[0]), as_array(tokens)).node
        bench.tree._evict_rows(upper)  # the lower part is on the device, the upper only in the tier
        longer = [*tokens, 4]
        assert bench.ask(longer) == fresh(hybrid, longer, 4)
        assert set(bench.usage(bench.last()).reused) == {"device", "memory"}


def as_array(tokens: list[int]):
    from holdover.state.address import as_tokens

    return as_tokens(tokens)

"""Choosing tokens: greedy, seeded, restricted, penalised."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdover.engine.messages import Sampling
from holdover.engine.sampler import SamplerState, choose, penalised, report, restrict, sample, uniform
from holdover.models.base import Model
from tests.engine.harness import Bench
from tests.engine.test_reuse import prompt

LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])
NO_END = frozenset[int]()


def state(seed: int = 1, **options: object) -> SamplerState:
    return SamplerState(Sampling(max_tokens=10, **options), seed=seed, choice=0)  # type: ignore[arg-type]


def drawn(count: int = 4000, **options: object) -> Counter[int]:
    each = state(**options)
    return Counter(choose(LOGITS, each, position, NO_END) for position in range(count))


def test_temperature_zero_is_greedy() -> None:
    assert drawn(20, temperature=0.0) == {3: 20}


def test_draws_follow_the_distribution() -> None:
    expected = torch.softmax(LOGITS, 0)
    counts = drawn()
    for token, probability in enumerate(expected.tolist()):
        deviation = math.sqrt(4000 * probability * (1 - probability))
        assert abs(counts[token] - 4000 * probability) < 5 * deviation + 1


def test_top_k_top_p_and_min_p_leave_out_what_is_unlikely() -> None:
    assert set(drawn(top_k=2)) == {3, 2}
    assert set(drawn(top_k=1)) == {3}
    assert set(drawn(top_p=0.6)) == {3}
    assert set(drawn(top_p=0.8)) == {3, 2}
    assert set(drawn(min_p=0.3)) == {3, 2}
    assert set(drawn(top_p=1e-9)) == {3}


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30), st.data())
def test_what_restrict_keeps_is_a_distribution_of_the_likeliest(logits: list[float], data: st.DataObject) -> None:
    sampling = Sampling(
        max_tokens=1,
        top_k=data.draw(st.one_of(st.none(), st.integers(1, 40))),
        top_p=data.draw(st.floats(0.01, 1.0)),
        min_p=data.draw(st.floats(0.0, 1.0)),
    )
    probabilities = torch.softmax(torch.tensor(logits), 0)
    ids, kept = restrict(probabilities, sampling)
    assert len(ids) == len(kept) >= 1
    assert float(kept.sum()) == pytest.approx(1.0, abs=1e-4)
    assert bool((kept[:-1] >= kept[1:]).all())
    left_out = set(range(len(logits))) - set(ids.tolist())
    assert all(probabilities[i] <= probabilities[ids[-1]] for i in left_out)


def test_the_same_seed_draws_the_same_tokens_and_another_does_not() -> None:
    def run(seed: int) -> list[int]:
        return [choose(LOGITS, state(seed=seed), position, NO_END) for position in range(50)]

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert uniform(1, 0, 7) != uniform(1, 1, 7), "each choice of a request draws for itself"


def test_penalties() -> None:
    each = state(presence_penalty=0.5, frequency_penalty=0.25)
    each.count(3)
    each.count(3)
    assert penalised(LOGITS, each, NO_END).tolist() == pytest.approx([0.0, 1.0, 2.0, 3.0 - 0.5 - 0.5, -1.0])
    each = state(repetition_penalty=2.0)
    each.prompt = {4, 2}
    assert penalised(LOGITS, each, NO_END).tolist() == pytest.approx([0.0, 1.0, 1.0, 3.0, -2.0])
    assert LOGITS.tolist() == [0.0, 1.0, 2.0, 3.0, -1.0], "the model's logits are left alone"


def test_end_tokens_cannot_be_chosen_before_min_tokens() -> None:
    each = state(temperature=0.0, min_tokens=1)
    assert sample(LOGITS[None], [each], [0], [frozenset({3})])[0] == [2]
    each.count(2)
    assert sample(LOGITS[None], [each], [1], [frozenset({3})])[0] == [3]


def test_logprobs_are_the_models_own() -> None:
    said = report(LOGITS, 2, 3)
    expected = torch.log_softmax(LOGITS, 0)
    assert said.logprob == pytest.approx(float(expected[2]))
    assert [token for token, _ in said.top] == [3, 2, 1]


def test_seeded_sampling_does_not_depend_on_who_else_runs(model: Model) -> None:
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    tokens = prompt(1, 50)
    alone = Bench(model).ask(tokens, 12, **options)
    bench = Bench(model)
    others = [bench.submit(prompt(seed, 40), 12, temperature=1.0, seed=seed) for seed in range(2, 5)]
    request = bench.submit(tokens, 12, **options)
    bench.run()
    assert bench.tokens(request) == alone
    assert all(len(bench.tokens(other)) == 12 for other in others)


def test_end_of_text_stops_unless_ignored(model: Model) -> None:
    tokens = prompt(3, 30)
    made = Bench(model).ask(tokens, 12)
    bench = Bench(model)
    request = bench.submit(tokens, 12, stop_token_ids=(made[4],))
    bench.run()
    assert bench.tokens(request) == made[: made.index(made[4]) + 1]
    assert bench.outputs[request][-1].finish_reason == "stop"

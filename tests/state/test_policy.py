"""Snapshot policy: where, and which to drop."""

from hypothesis import given
from hypothesis import strategies as st

from holdover.state.policy import ResponseReturns, prefill_stops, snapshots_to_drop

POSITIONS = st.lists(st.integers(1, 10**6), unique=True, max_size=60).map(sorted)


def test_a_branch_point_gets_a_snapshot_at_the_token() -> None:
    stops = prefill_stops(start=0, prompt_end=1946, known=560, boundaries=(), spacing=10_000, resumes_anywhere=False)
    assert stops == [560, 1946]


def test_a_long_prefill_loses_at_most_the_spacing() -> None:
    stops = prefill_stops(start=30, prompt_end=350, known=30, boundaries=(40, 400), spacing=100, resumes_anywhere=False)
    assert stops == [40, 130, 230, 330, 350]


def test_models_that_resume_anywhere_keep_only_the_prompts_end() -> None:
    assert prefill_stops(start=0, prompt_end=350, known=99, boundaries=(40,), spacing=100, resumes_anywhere=True) == [
        350
    ]


def test_nothing_to_compute_has_no_stops() -> None:
    assert prefill_stops(start=9, prompt_end=9, known=9, boundaries=(), spacing=100, resumes_anywhere=False) == []


@given(POSITIONS)
def test_thinning_keeps_the_newest_and_is_logarithmic(positions: list[int]) -> None:
    drop = snapshots_to_drop(positions)
    kept = [position for position in positions if position not in drop]
    assert drop <= set(positions)
    assert kept[-2:] == positions[-2:]
    assert len(kept) <= 2 + 20, "one in each span of doubled length, up to a million tokens back"


@given(POSITIONS.filter(bool))
def test_a_change_far_back_costs_at_most_as_much_again(positions: list[int]) -> None:
    kept = [position for position in positions if position not in snapshots_to_drop(positions)]
    newest = positions[-1]
    for position in positions:
        usable = [each for each in kept if each <= position]
        if usable:
            assert newest - usable[-1] <= 2 * max(1, newest - position) or usable[-1] == position


def test_responses_that_never_come_back_are_not_kept() -> None:
    returns = ResponseReturns()
    assert returns.keep_next()
    for _ in range(20):
        returns.observe(False)
    assert sum(returns.keep_next() for _ in range(64)) == 2, "only now and then, to notice a change"
    for _ in range(20):
        returns.observe(True)
    assert returns.keep_next()

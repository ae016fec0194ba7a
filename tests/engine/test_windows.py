"""Sliding windows in the engine: only live rows take device memory, are saved and loaded, and nothing is forgotten."""

import random

import pytest

from holdover.models.oracle import WINDOW, Oracle
from holdover.state.segment import Kind
from holdover.store.memory import MemoryTier
from tests.engine.harness import Bench
from tests.simulation.reference import Reference

LIVE = WINDOW - 1
BLOCK = Oracle("sliding").layout.window_block
WINDOWED = pytest.mark.parametrize("kind", ["mixed", "sliding", "everything"])


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def live_rows(position: int) -> range:
    """What is kept for whoever goes on from a position: a window, and the rest of its first block."""
    return range(max(0, position - LIVE) // BLOCK * BLOCK, position)


@WINDOWED
def test_a_prefill_of_any_length_holds_the_rows_of_one_window_and_one_step(kind: str) -> None:
    """500 tokens in steps of 16: with a window of 24, never more than 46 window rows are the sequence's own."""
    bench = Bench(Oracle(kind), max_batch_tokens=16, device_bytes=400_000)
    tokens = prompt(1, 500)
    bench.submit(tokens, 30)
    most = 0
    while not bench.engine.idle:
        bench.step()
        for sequence in bench.engine.scheduler.running:
            own = sum(len(slots) for slots in bench.engine.holdings._own_window(sequence))
            most = max(most, own)
    assert LIVE <= most <= LIVE + BLOCK - 1 + 16
    assert bench.tokens(bench.last()) == Reference(kind).answer(tokens, 30)


@WINDOWED
def test_on_the_device_are_the_rows_that_kept_positions_need_and_no_others(kind: str) -> None:
    bench = Bench(Oracle(kind), device_bytes=400_000)
    tokens = prompt(2, 60)
    for turn in range(12):
        tokens = [*tokens, *bench.ask(tokens, 4), *prompt(turn, 30)]
    kept = [node for node in bench.tree.nodes() if node.snapshot_slots is not None]
    needed = {position for node in kept for position in live_rows(node.end)}
    held = sum(node.end - node.window_start for node in bench.tree.nodes())
    assert held <= len(needed)
    assert len(needed) < len(tokens) / 2


@WINDOWED
def test_a_turn_saves_its_live_rows_once(kind: str) -> None:
    bench = Bench(Oracle(kind), tiers=(MemoryTier(16 << 20),), device_bytes=400_000)
    layout = bench.pool.layout
    counters = bench.engine.counters.tiers["memory"]

    def new_bytes(tokens: list[int]) -> int:
        before = counters.bytes_new_state
        bench.ask(tokens, 1)
        return counters.bytes_new_state - before - layout.bytes_per_snapshot

    tokens = prompt(3, 50)
    assert new_bytes(tokens) == 50 * layout.bytes_per_token + len(live_rows(50)) * layout.bytes_per_window_row
    tokens += prompt(4, 5)
    assert new_bytes(tokens) == 5 * (layout.bytes_per_token + layout.bytes_per_window_row)
    tokens += prompt(5, 100)
    assert new_bytes(tokens) == 100 * layout.bytes_per_token + len(live_rows(155)) * layout.bytes_per_window_row
    assert new_bytes(tokens) == -layout.bytes_per_snapshot, "nothing is new"
    assert bench.engine.exchange.audits["memory"].max_copies == 1


@WINDOWED
@pytest.mark.parametrize("length", [1, 2, LIVE, WINDOW, WINDOW + 1, 200])
def test_what_was_saved_is_gone_on_from_to_the_token(kind: str, length: int) -> None:
    tier = MemoryTier(16 << 20)
    bench = Bench(Oracle(kind), tiers=(tier,))
    tokens = prompt(length, length)
    bench.ask(tokens, 1)
    bench.tree.make_room(bench.pool.num_slots)
    loads: list[int] = []
    place = bench.store._place
    bench.store._place = lambda parts, segment: (  # type: ignore[method-assign]
        loads.extend(part.last - part.first for part in parts if part.saved.kind is Kind.WINDOW)
        or place(parts, segment)
    )
    longer = [*tokens, 7]
    assert bench.ask(longer, 30) == Reference(kind).answer(longer, 30)
    assert bench.usage(bench.last()).computed == 1
    assert sum(loads) == len(live_rows(length)), "only live rows are loaded"


@WINDOWED
def test_a_branch_pays_once_and_is_whole_afterwards(kind: str) -> None:
    """The branch is where no window rows were kept: the second agent computes them, the third finds them."""
    tier = MemoryTier(16 << 20)
    bench = Bench(Oracle(kind), tiers=(tier,))
    shared = prompt(6, 130)
    for seed, computed in ((7, 190), (8, 90), (9, 60), (10, 60)):
        tokens = shared + prompt(seed, 60)
        assert bench.ask(tokens, 5) == Reference(kind).answer(tokens, 5)
        assert bench.usage(bench.last()).computed == computed, "positions 100 (spacing) and 130 (branch) are kept"
        bench.tree.make_room(bench.pool.num_slots)
    assert bench.engine.exchange.audits["memory"].max_copies == 1


@WINDOWED
def test_lost_window_rows_are_computed_again(kind: str) -> None:
    tier = MemoryTier(16 << 20)
    bench = Bench(Oracle(kind), tiers=(tier,))
    tokens = prompt(11, 90)
    bench.ask(tokens, 1)
    bench.tree.make_room(bench.pool.num_slots)
    for name in [name for name in tier.scan() if name.endswith(".window")]:
        tier.delete(name)
    longer = [*tokens, 1, 2]
    assert bench.ask(longer, 5) == Reference(kind).answer(longer, 5)
    assert bench.engine.counters.loads_failed == 1
    assert bench.usage(bench.last()).computed == 92
    bench.tree.make_room(bench.pool.num_slots)
    assert bench.ask([*longer, 3], 5) == Reference(kind).answer([*longer, 3], 5)
    assert bench.usage(bench.last()).computed == 1, "what was computed again is kept again"


@WINDOWED
def test_a_device_too_full_for_more_keeps_fewer_positions_and_answers_rightly(kind: str) -> None:
    model = Oracle(kind)
    layout = model.layout
    slots = 310 * bool(layout.bytes_per_token) + 80 * len(layout.window_pages) + 20
    bench = Bench(model, device_bytes=slots * layout.slot_bytes, max_running=2, max_batch_tokens=32)
    tokens = prompt(12, 150)
    requests = [bench.submit(tokens + prompt(seed, 100), 40, boundaries=(20, 50, 90, 120)) for seed in range(3)]
    bench.run()
    for seed, request in enumerate(requests):
        assert bench.tokens(request) == Reference(kind).answer(tokens + prompt(seed, 100), 40)

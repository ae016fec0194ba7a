"""The device pool: one byte budget, no slot lost, no byte changed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.errors import HoldoverError
from holdover.state.layout import Layout
from holdover.state.pool import DevicePool
from tests.state.test_layout import layout

CPU = torch.device("cpu")


def pool(budget: int = 20_000, running: int = 3) -> DevicePool:
    return DevicePool(layout(), budget, running, CPU)


def test_the_budget_covers_slots_and_live_states() -> None:
    made = pool()
    assert made.arena.numel() + made.live.numel() <= 20_000
    assert made.arena.numel() + made.live.numel() > 20_000 - made.slot_bytes


def test_a_budget_too_small_says_what_to_do() -> None:
    with pytest.raises(HoldoverError, match="--device-memory"):
        pool(budget=1000)


def test_a_snapshot_comes_back_bit_for_bit() -> None:
    made = pool()
    made.live[1] = torch.randint(0, 256, (made.live_bytes,), dtype=torch.uint8)
    slots = made.allocate(made.slots_per_snapshot)
    assert slots is not None
    made.keep_snapshot(1, slots)
    made.resume_snapshot(slots, 2)
    assert torch.equal(made.live[2], made.live[1])
    place = torch.empty(made.layout.bytes_per_snapshot, dtype=torch.uint8)
    made.copy_snapshot(slots, place)
    made.fill_live(0, place)
    assert torch.equal(made.live[0, : len(place)], made.live[1, : len(place)])


def test_rows_come_back_bit_for_bit() -> None:
    made = pool()
    slots = made.allocate(10)
    assert slots is not None
    rows = torch.randint(0, 256, (10, made.slot_bytes), dtype=torch.uint8)
    made.write_rows(slots[::-1].copy(), rows)
    assert torch.equal(made.read_rows(slots), rows.flip(0))


def test_slots_given_back_twice_are_noticed() -> None:
    made = pool()
    slots = made.allocate(5)
    assert slots is not None
    made.free(slots)
    with pytest.raises(AssertionError, match="twice"):
        made.free(np.arange(made.num_slots))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=40))
def test_every_slot_has_one_owner(actions: list[tuple[bool, int]]) -> None:
    made = pool()
    held: list[np.ndarray] = []
    for take, count in actions:
        if take:
            slots = made.allocate(count)
            assert (slots is None) == (count > made.num_slots - sum(map(len, held)))
            if slots is not None:
                held.append(slots)
        elif held:
            made.free(held.pop(count % len(held)))
        everything = np.concatenate([made.free_slots(), *held])
        assert len(np.unique(everything)) == len(everything) == made.num_slots


def test_a_model_without_token_state_still_has_slots_for_snapshots() -> None:
    only_snapshots = Layout((), layout().snapshot_arrays)
    made = DevicePool(only_snapshots, 20_000, 2, CPU)
    assert made.slots_per_snapshot == 1

"""Tiers: the same five calls, one copy, a hard budget, nothing leased evicted."""

import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.errors import TierError
from holdover.store.ledger import Ledger
from holdover.store.memory import MemoryTier
from holdover.store.objects import disk_tier
from holdover.store.tier import PutResult, PutStatus, Tier

NAME = "ab" * 32 + ".rows"


def content(size: int, value: int = 1) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


@pytest.fixture(params=["memory", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return MemoryTier(10_000) if request.param == "memory" else disk_tier(tmp_path / "tier", 10_000)


def test_what_is_put_can_be_got(tier: Tier) -> None:
    assert tier.put(NAME, 100, lambda: content(100, 7)).status is PutStatus.KEPT
    assert tier.has(NAME)
    assert list(tier.scan()) == [NAME]
    with tier.get(NAME) as buffer:
        assert buffer is not None
        assert torch.equal(buffer, content(100, 7))
    tier.delete(NAME)
    assert not tier.has(NAME)
    assert tier.used_bytes() == 0
    with tier.get(NAME) as buffer:
        assert buffer is None


def test_the_same_segment_is_stored_once(tier: Tier) -> None:
    tier.put(NAME, 100, lambda: content(100))
    used = tier.used_bytes()

    def never() -> torch.Tensor:
        raise AssertionError("made again, though it is there")

    assert tier.put(NAME, 100, never).status is PutStatus.ALREADY_THERE
    assert tier.used_bytes() == used


def test_the_least_recently_used_goes_first(tier: Tier) -> None:
    names = [f"{i:02d}" * 32 + ".rows" for i in range(4)]
    for name in names[:3]:
        tier.put(name, 2200, lambda: content(2200))
    tier.touch([names[0]])
    result = tier.put(names[3], 4000, lambda: content(4000))
    assert result.status is PutStatus.KEPT
    assert names[1] in result.evicted
    assert names[0] not in result.evicted
    assert tier.has(names[0])
    assert tier.used_bytes() <= tier.budget_bytes


def test_what_is_being_read_is_not_evicted(tier: Tier) -> None:
    tier.put(NAME, 6000, lambda: content(6000, 3))
    with tier.get(NAME) as buffer:
        other = "cd" * 32 + ".rows"
        assert tier.put(other, 6000, lambda: content(6000)).status is PutStatus.REFUSED
        assert buffer is not None
        assert bool((buffer == 3).all())
    assert tier.put(other, 6000, lambda: content(6000)).status is PutStatus.KEPT


def test_what_can_never_fit_is_refused_before_anything_is_evicted(tier: Tier) -> None:
    tier.put(NAME, 500, lambda: content(500))
    assert tier.put("ef" * 32 + ".rows", 20_000, lambda: content(20_000)).status is PutStatus.REFUSED
    assert tier.has(NAME)


def test_a_failed_making_leaves_nothing_behind(tier: Tier) -> None:
    def fails() -> torch.Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        tier.put(NAME, 500, fails)
    assert tier.used_bytes() == 0
    assert not tier.has(NAME)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 700)), max_size=60))
def test_the_budget_holds_at_every_moment(puts: list[tuple[int, int]]) -> None:
    real: dict[str, int] = {}
    ledger = Ledger(1000, lambda name: real.pop(name, None) and None)
    for number, size in puts:
        name = str(number)
        if ledger.reserve(name, size).status is PutStatus.KEPT:
            real[name] = size
            assert sum(real.values()) <= 1000
            ledger.complete(name)
        assert ledger.used_bytes == sum(real.values())


def test_many_threads_store_one_copy_and_keep_the_budget() -> None:
    tier = MemoryTier(50_000)
    statuses: list[PutStatus] = []

    def work(seed: int) -> None:
        for i in range(200):
            name = f"{(seed + i) % 40:02d}" * 32 + ".rows"
            statuses.append(tier.put(name, 2000, lambda: content(2000)).status)
            assert tier.used_bytes() <= 50_000

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 800
    assert tier.used_bytes() == len(list(tier.scan())) * (2000 + 768)


def test_a_disk_tier_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(TierError, match=r"can't be written.*--tier disk"):
        disk_tier(blocked / "tier", 1000)


def test_a_disk_tier_is_private_and_comes_back_after_a_restart(tmp_path: Path) -> None:
    first = disk_tier(tmp_path / "tier", 10_000)
    first.put(NAME, 100, lambda: content(100, 9))
    assert (os.stat(tmp_path / "tier").st_mode & 0o777) == 0o700
    second = disk_tier(tmp_path / "tier", 10_000)
    assert second.used_bytes() == 100
    with second.get(NAME) as buffer:
        assert buffer is not None
        assert bool((buffer == 9).all())


def test_a_smaller_budget_after_a_restart_is_kept(tmp_path: Path) -> None:
    first = disk_tier(tmp_path / "tier", 10_000)
    for i in range(4):
        first.put(f"{i:02d}" * 32 + ".rows", 1000, lambda: content(1000))
    assert disk_tier(tmp_path / "tier", 2500).used_bytes() == 2000
    assert sum(file.stat().st_size for file in (tmp_path / "tier").rglob("*.rows")) == 2000


def test_who_reads_a_segment_that_is_removed_reads_on_to_the_end(tier: Tier) -> None:
    tier.put(NAME, 100, lambda: content(100, 7))
    with tier.get(NAME) as buffer:
        tier.delete(NAME)
        assert not tier.has(NAME)
        assert list(tier.scan()) == []
        with tier.get(NAME) as other:
            assert other is None
        assert tier.put(NAME, 100, lambda: content(100, 8)).status is PutStatus.REFUSED
        assert tier.used_bytes() >= 100, "its bytes are still there"
        assert buffer is not None
        assert torch.equal(buffer, content(100, 7))
    assert tier.used_bytes() == 0
    assert tier.put(NAME, 100, lambda: content(100, 8)).status is PutStatus.KEPT


def test_whoever_asks_the_books_does_not_wait_for_a_slow_removal() -> None:
    """A bucket takes its time to delete; the engine asks what is there at every step."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(_: str) -> None:
        begun.set()
        assert go_on.wait(10)

    ledger = Ledger(100, slow)
    ledger.reserve("old", 60)
    ledger.complete("old")
    remover = threading.Thread(target=ledger.reserve, args=("new", 80))
    remover.start()
    assert begun.wait(10)
    assert not ledger.has("old")
    ledger.touch(["old", "new"])
    assert ledger.used_bytes == 60, "the bytes are still there"
    assert ledger.reserve("other", 50).status is PutStatus.REFUSED
    assert ledger.reserve("other", 40).status is PutStatus.KEPT
    go_on.set()
    remover.join(10)
    assert ledger.used_bytes <= 100
    assert not ledger.has("old")


def test_bytes_that_cannot_be_removed_still_count() -> None:
    stuck = True

    def drop(name: str) -> None:
        if stuck:
            raise TierError("read-only")

    ledger = Ledger(100, drop)
    for name in ("a", "b"):
        ledger.reserve(name, 50)
        ledger.complete(name)
    with pytest.raises(TierError, match="read-only") as error:
        ledger.reserve("c", 80)
    assert error.value.evicted == ("a", "b")
    assert (ledger.used_bytes, ledger.has("a"), ledger.has("b")) == (100, False, False)
    with pytest.raises(TierError, match="read-only"):
        ledger.remove("a")
    stuck = False
    assert ledger.reserve("c", 80) == PutResult(PutStatus.KEPT)
    assert ledger.used_bytes == 80

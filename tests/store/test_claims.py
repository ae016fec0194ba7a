"""Engines that share a tier compute one prefix once: who computes it leaves a note, and others wait for the rows."""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdover.engine.exchange import ASK_AGAIN_SECONDS, UNKNOWN_SECONDS
from holdover.errors import TierError
from holdover.models.oracle import Oracle
from holdover.state.address import AddressChain, address_key, as_tokens
from holdover.store.claims import MOST_MARKS, Claim, make_claim, shared_with
from holdover.store.memory import MemoryTier
from holdover.store.objects import CLAIM_LEFT_SECONDS, ObjectTier, disk_tier
from tests.copies import copies
from tests.engine.harness import Bench

KINDS = ["hybrid", "dense", "recurrent", "sliding", "mixed", "everything"]
SHARED = random.Random(3).choices(range(256), k=120)
KEY = address_key("model", "")


def chain(tokens: list[int]) -> AddressChain:
    return AddressChain(KEY, as_tokens(tokens))


def notes(folder: Path) -> list[Path]:
    return sorted((folder / "claims").glob("*")) if (folder / "claims").exists() else []


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def bench(kind: str, folder: Path, clock: Clock) -> Bench:
    tiers = (MemoryTier(16 << 20), disk_tier(folder, 16 << 20))
    made = Bench(Oracle(kind), tiers=tiers, find_from=1, claim_from=50, max_batch_tokens=16)
    made.store._clock = clock
    return made


def expected(kind: str, prompt: list[int]) -> list[int]:
    return Bench(Oracle(kind)).ask(prompt, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_that_another_engine_is_computing_is_waited_for(kind: str, tmp_path: Path, clock: Clock) -> None:
    first, second = bench(kind, tmp_path, clock), bench(kind, tmp_path, clock)
    ours, theirs = SHARED, [*SHARED, *random.Random(4).choices(range(256), k=30)]
    one = first.submit(ours)
    first.step()
    assert len(notes(tmp_path)) == 1
    other = second.submit(theirs)
    for _ in range(3):
        assert not second.step()  # asks
        assert not second.step()  # and hears
        assert second.engine.wakes_at() == pytest.approx(clock.now + ASK_AGAIN_SECONDS)
        clock.now += ASK_AGAIN_SECONDS
    first.run()
    assert notes(tmp_path) == []
    clock.now += ASK_AGAIN_SECONDS
    second.run()
    assert (first.tokens(one), second.tokens(other)) == (expected(kind, ours), expected(kind, theirs))
    assert second.usage(other).computed == 30
    assert second.usage(other).reused == {"disk": 120}
    assert set(copies(tmp_path).values()) == {1}
    assert notes(tmp_path) == []


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_an_engine_that_dies_costs_the_others_a_wait_and_no_more(kind: str, tmp_path: Path, clock: Clock) -> None:
    gone, others = bench(kind, tmp_path, clock), disk_tier(tmp_path, 16 << 20)
    gone.submit(SHARED)  # and is never heard of again; but the folder has other users
    second = bench(kind, tmp_path, clock)
    request = second.submit(SHARED)
    while clock.now < UNKNOWN_SECONDS - ASK_AGAIN_SECONDS:
        assert not second.step()
        clock.now += ASK_AGAIN_SECONDS
    clock.now += 2 * ASK_AGAIN_SECONDS
    second.run()
    assert second.tokens(request) == expected(kind, SHARED)
    third = bench(kind, tmp_path, clock)
    assert third.ask([*SHARED, 1]) == expected(kind, [*SHARED, 1])
    assert third.usage(third.last()).cached_tokens == 120, "what the note was of is there by now"
    assert others.opened


def test_who_has_a_folder_alone_takes_the_notes_of_the_dead_away(tmp_path: Path, clock: Clock) -> None:
    """A server that was killed in the middle of a prompt, and is started again, does not wait for itself."""
    gone = bench("hybrid", tmp_path, clock)
    gone.submit(SHARED)
    tier = gone.store.shared_tiers[0]
    assert isinstance(tier, ObjectTier)
    tier.close()
    time.sleep(0.01)  # a file's time is no finer
    assert len(notes(tmp_path)) == 1
    again = bench("hybrid", tmp_path, clock)
    assert notes(tmp_path) == []
    assert again.ask(SHARED) == expected("hybrid", SHARED)
    assert clock.now == 0.0


def test_nobody_waits_longer_than_computing_it_would_take(tmp_path: Path, clock: Clock) -> None:
    first = bench("hybrid", tmp_path, clock)
    first.submit(SHARED)
    second = bench("hybrid", tmp_path, clock)
    for size in (4, 8, 12, 16):
        second.engine.rates.computed(size, size * 0.001)
    request = second.submit(SHARED)
    assert not second.step()
    clock.now += 0.120 + 1.0
    second.run()
    assert second.tokens(request) == expected("hybrid", SHARED)


def test_where_loading_would_take_longer_than_computing_nobody_waits(tmp_path: Path, clock: Clock) -> None:
    first = bench("dense", tmp_path, clock)
    first.submit(SHARED)
    second = bench("dense", tmp_path, clock)
    for size in (4, 8, 12, 16):
        second.engine.rates.computed(size, size * 1e-6)
        second.engine.rates.loaded({"disk": size * 1000}, 1.0)
    request = second.submit(SHARED)
    second.run()
    assert clock.now == 0.0
    assert second.tokens(request) == expected("dense", SHARED)


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_requests_of_one_engine_wait_for_each_other_as_before(kind: str, tmp_path: Path, clock: Clock) -> None:
    engine = bench(kind, tmp_path, clock)
    requests = [engine.submit([*SHARED, number]) for number in range(4)]
    engine.run()
    assert clock.now == 0.0
    assert engine.engine.counters.prompt_tokens_computed == 124
    assert [engine.tokens(each) for each in requests] == [expected(kind, [*SHARED, n]) for n in range(4)]


def test_who_has_little_in_common_with_what_is_computed_does_not_wait(tmp_path: Path, clock: Clock) -> None:
    first = bench("hybrid", tmp_path, clock)
    first.submit([*SHARED[:40], *random.Random(5).choices(range(256), k=200)])
    second = bench("hybrid", tmp_path, clock)
    request = second.submit(SHARED)
    second.run()
    assert clock.now == 0.0
    assert second.tokens(request) == expected("hybrid", SHARED)


@pytest.mark.parametrize("when", ["at once", "while it is computed"])
def test_a_request_that_is_cancelled_takes_its_note_away(when: str, tmp_path: Path, clock: Clock) -> None:
    engine = bench("hybrid", tmp_path, clock)
    request = engine.submit(SHARED)
    if when != "at once":
        engine.step()
        engine.step()
    assert len(notes(tmp_path)) == 1
    engine.engine.cancel(request)
    engine.step()
    engine.run()
    assert notes(tmp_path) == []
    assert not engine.store.claims.own


def test_who_waits_for_others_can_be_cancelled(tmp_path: Path, clock: Clock) -> None:
    first = bench("hybrid", tmp_path, clock)
    first.submit(SHARED)
    second = bench("hybrid", tmp_path, clock)
    request = second.submit(SHARED)
    second.step()
    second.engine.cancel(request)
    clock.now += 1.0
    second.step()
    assert second.engine.idle
    assert second.engine.wakes_at() is None


def test_old_notes_go_when_a_place_is_opened(tmp_path: Path, clock: Clock) -> None:
    first = bench("hybrid", tmp_path, clock)
    first.submit(SHARED)
    (note,) = notes(tmp_path)
    disk_tier(tmp_path, 16 << 20)
    assert notes(tmp_path) == [note]
    past = time.time() - CLAIM_LEFT_SECONDS - 60
    os.utime(note, (past, past))
    disk_tier(tmp_path, 16 << 20)
    assert notes(tmp_path) == []


@pytest.mark.parametrize("broken", ["claim", "unclaim"])
def test_a_tier_that_takes_no_notes_costs_nothing_else(
    broken: str, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TierError("the disk tier fails")

    monkeypatch.setattr(ObjectTier, broken, fail)
    engine = bench("hybrid", tmp_path, clock)
    assert engine.ask(SHARED) == expected("hybrid", SHARED)
    assert engine.store.faults["disk"] == 1


# Between the first and the last thing that is saved of a prompt


class Held:
    """An engine whose saves wait until they are let go, one after another."""

    def __init__(self, kind: str, folder: Path, clock: Clock) -> None:
        self.bench = bench(kind, folder, clock)
        self.jobs: list[object] = []
        self._write = self.bench.store._write
        self.bench.store._write = self.jobs.append

    def release(self, number: int = 1) -> None:
        for _ in range(number):
            self._write(self.jobs.pop(0))

    def finish(self) -> None:
        for _ in range(100):
            self.bench.step()
            self.release(len(self.jobs))
        assert self.bench.engine.idle


def half_saved(kind: str, folder: Path, clock: Clock) -> Held:
    """An engine that has computed SHARED and saved nothing yet."""
    held = Held(kind, folder, clock)
    held.bench.submit(SHARED, 1)
    for _ in range(40):
        held.bench.step()
    assert len(notes(folder)) == 1
    return held


THEIRS = [*SHARED, *random.Random(4).choices(range(256), k=30)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_in_part_is_waited_for_whatever_part_it_is(kind: str, tmp_path: Path, clock: Clock) -> None:
    jobs = len(half_saved(kind, tmp_path / "count", clock).jobs)
    assert jobs > 0
    for number in range(jobs):
        folder = tmp_path / str(number)
        first, second = half_saved(kind, folder, clock), bench(kind, folder, clock)
        first.release(number)
        request = second.submit(THEIRS)
        for _ in range(2):  # all that it takes to go on may be there by now: then it does not wait
            second.step()
            second.step()
            clock.now += ASK_AGAIN_SECONDS
        assert number or second.engine.wakes_at() is not None
        first.finish()
        assert notes(folder) == []
        clock.now += ASK_AGAIN_SECONDS
        second.run()
        assert second.tokens(request) == expected(kind, THEIRS)
        assert second.usage(request).computed == 30, f"after {number} of {jobs} saves"
        assert set(copies(folder).values()) == {1}
        assert notes(folder) == []


@pytest.mark.parametrize("kind", ["hybrid", "everything"])
def test_a_note_once_heeded_is_heeded_for_what_comes_later(kind: str, tmp_path: Path, clock: Clock) -> None:
    """It lies under a name that the later request does not ask for: the rows there are known by then."""
    first, second = half_saved(kind, tmp_path, clock), bench(kind, tmp_path, clock)
    gone = second.submit(THEIRS)
    assert not second.step()
    while not list(tmp_path.rglob("*.rows")):
        first.release()
    clock.now += ASK_AGAIN_SECONDS
    assert not second.step()  # asks again
    assert not second.step()  # and has learned of the rows
    second.engine.cancel(gone)
    second.step()
    request = second.submit(THEIRS)
    assert not second.step()
    assert not second.step()
    first.finish()
    clock.now += ASK_AGAIN_SECONDS
    second.run()
    assert second.tokens(request) == expected(kind, THEIRS)
    assert second.usage(request).computed == 30


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_between_the_look_and_the_note_is_found(
    kind: str, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = half_saved(kind, tmp_path, clock), bench(kind, tmp_path, clock)
    tier = second.store.shared_tiers[0]
    claim = tier.claim

    def late(name: str, content: bytes) -> bytes | None:
        first.finish()
        return claim(name, content)

    monkeypatch.setattr(tier, "claim", late)
    request = second.submit(THEIRS)
    second.run()
    assert second.tokens(request) == expected(kind, THEIRS)
    assert second.usage(request).computed == 30
    assert notes(tmp_path) == []


# What a note says


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 600), st.integers(0, 600))
def test_a_note_tells_how_much_is_in_common(first: int, more: int, same: int, extra: int) -> None:
    tokens = np.random.default_rng(1).integers(0, 256, 2000).tolist()
    theirs = tokens[: first + more]
    same = max(same, first)
    ours = [*tokens[:same], 999, *tokens[:extra]]
    shared = shared_with(make_claim(chain(theirs), first, len(theirs)), chain(ours), first, len(ours))
    truly = min(same, len(theirs), len(ours))
    assert first <= shared <= max(first, truly)
    if truly >= len(theirs):
        assert shared == len(theirs)
    if (truly - first) * 2 < len(theirs) - first:
        assert shared == first, "less than half of it: not to be waited for"


def notes_of_others() -> Iterator[st.SearchStrategy[bytes]]:
    yield st.binary(max_size=200)
    marks = st.lists(st.tuples(st.integers(-5, 1 << 40), st.binary(max_size=10)), max_size=40)
    yield marks.map(lambda each: msgspec.msgpack.encode(Claim(each)))
    yield st.just(msgspec.msgpack.encode(Claim([(MOST_MARKS, b"")])))


@given(st.one_of(*notes_of_others()))
def test_whatever_lies_there_is_understood_or_ignored(content: bytes) -> None:
    assert shared_with(content, chain(SHARED), 20, 120) == 20

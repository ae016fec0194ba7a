"""What others have saved, or an engine before it was restarted, is found prefix by prefix, and lies in a tier once."""

import random
from pathlib import Path

import pytest

from holdover.models.oracle import Oracle
from holdover.state.segment import Kind, parse_header
from holdover.store.memory import MemoryTier
from holdover.store.objects import ObjectTier, disk_tier, object_path, parse_path
from holdover.store.tier import Tier
from tests.copies import copies
from tests.engine.harness import Bench

KINDS = ["hybrid", "dense", "recurrent", "sliding", "mixed", "everything"]
PROMPT = random.Random(3).choices(range(256), k=120)


def bench(kind: str, *tiers: Tier) -> Bench:
    return Bench(Oracle(kind), tiers=tiers, find_from=1)


def expected(kind: str, prompt: list[int], count: int = 3) -> list[int]:
    return bench(kind).ask(prompt, count)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restarted_engine_goes_on_from_all_that_was_saved(kind: str, tmp_path: Path) -> None:
    first = bench(kind, disk_tier(tmp_path, 16 << 20))
    first.ask(PROMPT[:80], 1)
    first.ask(PROMPT, 1)
    second = bench(kind, disk_tier(tmp_path, 16 << 20))
    prompt = [*PROMPT, 1, 2, 3]
    assert second.ask(prompt) == expected(kind, prompt, 4)
    counters = second.engine.counters
    assert counters.prompt_tokens_computed == 3
    assert counters.tiers["disk"].segments_found > 0


@pytest.mark.parametrize("kind", KINDS)
def test_engines_with_one_folder_compute_and_keep_a_shared_prompt_once(kind: str, tmp_path: Path) -> None:
    """One after another, each with an end of its own: the folder has the shared part once, and all but the first find
    it."""
    for number in range(4):
        engine = bench(kind, MemoryTier(16 << 20), disk_tier(tmp_path, 16 << 20))
        prompt = [*PROMPT, *random.Random(number).choices(range(256), k=20)]
        assert engine.ask(prompt, boundaries=[len(PROMPT)]) == expected(kind, prompt, 4)
        assert engine.engine.counters.prompt_tokens_computed == (140 if number == 0 else 20)
    assert set(copies(tmp_path).values()) <= {1}


@pytest.mark.parametrize("kind", ["hybrid", "dense", "mixed"])
def test_two_that_save_one_prefix_at_the_same_moment_cut_unlike_keep_it_once(kind: str, tmp_path: Path) -> None:
    """Neither could know of the other: both had computed before either saved."""
    first = bench(kind, MemoryTier(16 << 20), disk_tier(tmp_path, 16 << 20))
    second = bench(kind, MemoryTier(16 << 20), disk_tier(tmp_path, 16 << 20))
    prompts = [[*PROMPT, *random.Random(number).choices(range(256), k=20)] for number in range(2)]
    before = second.store.save
    held = []
    second.store.save = held.append  # type: ignore[method-assign]
    request = second.submit(prompts[1])
    while len(second.tokens(request)) < 4:
        second.step()
    assert first.ask(prompts[0]) == expected(kind, prompts[0], 4)
    second.store.save = before  # type: ignore[method-assign]
    for job in held:
        second.store.save(job)
    second.run()
    assert second.tokens(request) == expected(kind, prompts[1], 4)
    assert set(copies(tmp_path).values()) == {1}
    third = bench(kind, disk_tier(tmp_path, 16 << 20))
    for prompt in prompts:
        longer = [*prompt, 9, 9]
        assert third.ask(longer) == expected(kind, longer, 4)
    assert third.engine.counters.prompt_tokens_computed == 4


@pytest.mark.parametrize("kind", ["hybrid", "dense", "mixed", "everything"])
def test_all_of_several_agents_find_a_way_into_a_tier_where_another_engine_was_faster(
    kind: str, tmp_path: Path
) -> None:
    """Another engine has saved what they share, and cut it elsewhere, while their saves were waiting: what goes on from
    the shared part is saved anew, and what goes on from that in turn, in every tier."""
    first = bench(kind, MemoryTier(16 << 20), disk_tier(tmp_path, 16 << 20))
    second = bench(kind, MemoryTier(16 << 20), disk_tier(tmp_path, 16 << 20))
    prompts = [[*PROMPT, *random.Random(number).choices(range(256), k=20 + number)] for number in range(5)]
    before = second.store.save
    held = []
    second.store.save = held.append  # type: ignore[method-assign]
    requests = [second.submit(prompt) for prompt in prompts[1:]]
    while any(len(second.tokens(request)) < 4 for request in requests):
        second.step()
    first.ask(prompts[0])
    second.store.save = before  # type: ignore[method-assign]
    for job in held:
        second.store.save(job)
    second.run()
    assert set(copies(tmp_path).values()) == {1}
    third = bench(kind, disk_tier(tmp_path, 16 << 20))
    for prompt in prompts:
        longer = [*prompt, 9, 9]
        assert third.ask(longer) == expected(kind, longer, 4)
    assert third.engine.counters.prompt_tokens_computed == 2 * len(prompts)


def test_another_models_state_is_left_alone(tmp_path: Path) -> None:
    bench("mixed", disk_tier(tmp_path, 16 << 20)).ask(PROMPT, 1)
    before = sorted(tmp_path.rglob("*.*"))
    other = bench("hybrid", disk_tier(tmp_path, 16 << 20))
    assert other.ask(PROMPT) == expected("hybrid", PROMPT, 4)
    assert other.engine.counters.prompt_tokens_computed == len(PROMPT)
    assert set(before) <= set(tmp_path.rglob("*.*"))


def test_another_tenants_state_is_not_found(tmp_path: Path) -> None:
    bench("hybrid", disk_tier(tmp_path, 16 << 20)).ask(PROMPT, 1, salt="a")
    other = bench("hybrid", disk_tier(tmp_path, 16 << 20))
    other.ask(PROMPT, 1, salt="b")
    assert other.engine.counters.prompt_tokens_computed == len(PROMPT)


def root(folder: Path) -> Path:
    """The file of the rows that go on from none."""
    (found,) = (file for file in folder.rglob("*.rows") if f".{'0' * 16}." in file.name)
    return found


def test_a_damaged_head_is_a_miss_and_gives_way(tmp_path: Path) -> None:
    bench("hybrid", disk_tier(tmp_path, 16 << 20)).ask(PROMPT, 1)
    rows = root(tmp_path)
    content = bytearray(rows.read_bytes())
    place = parse_header(bytes(content))[2] + 8  # an id of a token: the head looks right
    content[place] ^= 1
    rows.write_bytes(content)
    engine = bench("hybrid", disk_tier(tmp_path, 16 << 20))
    assert engine.ask(PROMPT) == expected("hybrid", PROMPT, 4)
    assert engine.engine.counters.prompt_tokens_computed == len(PROMPT)
    assert set(copies(tmp_path).values()) == {1}
    third = bench("hybrid", disk_tier(tmp_path, 16 << 20))
    assert third.ask([*PROMPT, 1]) == expected("hybrid", [*PROMPT, 1], 4)
    assert third.engine.counters.prompt_tokens_computed == 1


def test_what_goes_on_from_rows_that_are_gone_goes_when_a_folder_is_opened(tmp_path: Path) -> None:
    engine = bench("hybrid", disk_tier(tmp_path, 16 << 20))
    engine.ask(PROMPT[:60], 1)
    engine.ask(PROMPT, 1)
    tier = engine.store.tiers[0]
    assert isinstance(tier, ObjectTier)
    assert tier.num_segments > 2
    root(tmp_path).unlink()
    assert disk_tier(tmp_path, 16 << 20).num_segments == 0
    assert not list(tmp_path.rglob("*.rows"))


def test_what_others_go_on_from_is_evicted_last(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, 9000)
    engine = bench("dense", tier)
    for length in range(20, 121, 20):
        engine.ask(PROMPT[:length], 1)
    names = [parse_path(file.name) for file in tmp_path.rglob("*.rows")]
    rows = {name[:16] for name, _ in filter(None, names)}
    assert all(parent is None or parent in rows for _, parent in filter(None, names))


def test_paths_say_who_goes_on_from_whom() -> None:
    name, parent = f"{'ab' * 32}.{Kind.ROWS.value}", f"{'cd' * 32}.{Kind.ROWS.value}"
    assert parse_path(object_path(name, parent)) == (name, "cd" * 8)
    assert parse_path(object_path(name, None)) == (name, None)
    assert parse_path("segments/ab/" + name) is None


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_rows_that_another_engine_has_put_in_place_of_evicted_ones_are_not_taken_for_them(
    kind: str, tmp_path: Path
) -> None:
    """They have the same name, the same range, and the same first token; the others differ."""
    engine = bench(kind, disk_tier(tmp_path / "mine", 16 << 20))
    engine.ask(PROMPT, 1)
    bench(kind, disk_tier(tmp_path / "theirs", 16 << 20)).ask([*PROMPT[:60], *reversed(PROMPT[60:])], 1)
    mine, theirs = (root(tmp_path / each) for each in ("mine", "theirs"))
    assert mine.read_bytes() != theirs.read_bytes()
    assert mine.name == theirs.name
    mine.write_bytes(theirs.read_bytes())
    assert engine.tree.make_room(engine.pool.num_slots)
    assert engine.ask([*PROMPT, 1]) == expected(kind, [*PROMPT, 1], 4)
    assert theirs.read_bytes() == mine.read_bytes(), "it is whole, and somebody else's: nobody removes it"


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_what_vanished_behind_a_tiers_back_is_saved_again_at_the_next_turn(kind: str, tmp_path: Path) -> None:
    engine = Bench(Oracle(kind), tiers=(disk_tier(tmp_path, 16 << 20),), device_bytes=12 << 10, max_running=1)
    engine.ask(PROMPT, 1)
    files = set((tmp_path / "segments").rglob("*.*.*"))
    for first in range(12):  # PROMPT leaves the device
        engine.ask([first, *PROMPT], 1)
    assert all(file.exists() for file in files)
    for file in (tmp_path / "segments").rglob("*.*.*"):
        file.unlink()
    assert engine.ask(PROMPT, 1) == expected(kind, PROMPT, 1)
    assert engine.engine.counters.tiers["disk"].segments_lost > 0
    assert all(file.exists() for file in files if file.suffix == ".rows")

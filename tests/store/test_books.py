"""The books of a folder that several processes write to, and of one that is still being listed."""

import random
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from holdover.errors import TierError
from holdover.state.segment import Link
from holdover.store.objects import ObjectTier, disk_tier, object_path
from holdover.store.place import Item, Place
from holdover.store.tier import PutStatus
from holdover.store.usage import FolderUsage


def name(number: int) -> str:
    return f"{number:064x}.rows"


def content(size: int) -> torch.Tensor:
    return torch.full((size,), 7, dtype=torch.uint8)


def on_disk(folder: Path) -> int:
    """Each file once: one that is being written has two names for a moment. What has gone when we look counts not."""
    sizes: dict[int, int] = {}
    for file in (folder / "segments").rglob("*"):
        with suppress(FileNotFoundError):
            if stat.S_ISREG((facts := file.stat()).st_mode):
                sizes[facts.st_ino] = facts.st_size
    return sum(sizes.values())


WRITER = """
import random, sys, torch
from pathlib import Path
from holdover.store.objects import disk_tier
number, folder = int(sys.argv[1]), Path(sys.argv[2])
tier = disk_tier(folder, 100_000)
rng = random.Random(number)
for i in range(150):
    size = rng.randrange(1000, 9000)
    tier.put(f"{rng.randrange(400):064x}.rows", size, lambda: torch.zeros(size, dtype=torch.uint8))
    if i % 10 == 0:
        tier.delete(f"{rng.randrange(400):064x}.rows")
print("done")
"""


def test_processes_that_write_to_one_folder_keep_its_budget_together(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER]
    writers = [
        subprocess.Popen([*command, str(i), str(tmp_path / "t")], stdout=subprocess.PIPE, text=True) for i in range(3)
    ]
    most = 0
    (tmp_path / "t/segments").mkdir(parents=True)
    watcher = FolderUsage(tmp_path / "t")
    while any(writer.poll() is None for writer in writers):
        with watcher.held() as total:  # so that what we see in one file after another was there at one time
            seen = on_disk(tmp_path / "t")
            assert seen <= total.nbytes <= 100_000
        most = max(most, seen)
        time.sleep(0.002)
    watcher.close()
    assert [writer.communicate()[0] for writer in writers] == ["done\n"] * 3
    assert most > 50_000
    last = disk_tier(tmp_path / "t", 100_000)
    assert last.used_bytes() == on_disk(tmp_path / "t") > 50_000


def test_what_another_process_wrote_can_go_for_what_is_new(tmp_path: Path) -> None:
    mine, other = disk_tier(tmp_path, 10_000), disk_tier(tmp_path, 10_000)
    assert other.put(name(1), 9000, lambda: content(9000)).status is PutStatus.KEPT
    assert not mine.has(name(1))
    assert mine.put(name(2), 9000, lambda: content(9000)).status is PutStatus.KEPT
    assert on_disk(tmp_path) == mine.used_bytes() == other.used_bytes() == 9000


def test_a_file_is_given_back_once_though_two_remove_it(tmp_path: Path) -> None:
    mine = disk_tier(tmp_path, 10_000)
    mine.put(name(1), 4000, lambda: content(4000))
    mine.put(name(2), 3000, lambda: content(3000))
    other = disk_tier(tmp_path, 10_000)
    mine.delete(name(1))
    other.delete(name(1))
    assert mine.used_bytes() == other.used_bytes() == 3000
    assert not other.has(name(1))


def test_one_that_was_killed_is_counted_anew_when_nobody_else_is_there(tmp_path: Path) -> None:
    first = disk_tier(tmp_path, 10_000)
    first.put(name(1), 4000, lambda: content(4000))
    path = tmp_path / object_path(name(2), None)
    path.parent.mkdir(exist_ok=True)
    path.with_name(path.name + "#1").write_bytes(b"x" * 3000)  # as a killed writer leaves it
    usage = FolderUsage(tmp_path)
    usage.give(-3000)  # and the bytes that it had taken
    assert not usage.enter()
    second = disk_tier(tmp_path, 10_000)
    assert second.used_bytes() == 7000, "another uses the folder: nothing of his is removed or counted"
    usage.close()
    first.close()
    second.close()
    third = disk_tier(tmp_path, 10_000)
    assert third.used_bytes() == 4000 == on_disk(tmp_path)


class SlowPlace(Place):
    """Its list comes when it is let go."""

    go = threading.Event()

    def list(self, prefix: str = "segments") -> Iterator[Item]:
        assert self.go.wait(30)
        yield from super().list(prefix)


def test_a_tier_is_of_use_before_its_books_are_complete(tmp_path: Path) -> None:
    disk_tier(tmp_path, 10_000).put(name(1), 100, lambda: content(100), Link("ab", None, ""))
    place = SlowPlace(disk_tier(tmp_path, 10_000).place._store, str(tmp_path))
    place.go.clear()
    tier = ObjectTier(place, 10_000, "disk", wait=False)
    assert not tier.opened
    assert tier.head(name(1), 10, None) == bytes([7] * 10)
    assert tier.adopt(name(1), 100, Link("ab", None, ""))
    with tier.get(name(1)) as buffer:
        assert buffer is not None and torch.equal(buffer, content(100))
    saved: list[PutStatus] = []
    saver = threading.Thread(target=lambda: saved.append(tier.put(name(2), 50, lambda: content(50)).status))
    saver.start()
    time.sleep(0.1)
    assert not saved, "what is saved waits, so that the budget holds"
    place.go.set()
    saver.join(30)
    assert saved == [PutStatus.KEPT]
    assert tier.opened
    assert tier.used_bytes() == 150
    assert list(tier.scan()) == [name(1), name(2)]


class FailingPlace(Place):
    fails = True

    def list(self, prefix: str = "segments") -> Iterator[Item]:
        if self.fails:
            raise TierError("no list today")
        yield from super().list(prefix)


def test_a_tier_that_could_not_be_listed_is_listed_later(tmp_path: Path) -> None:
    disk_tier(tmp_path, 10_000).put(name(1), 100, lambda: content(100))
    place = FailingPlace(disk_tier(tmp_path, 10_000).place._store, str(tmp_path))
    with pytest.raises(TierError, match="no list today"):
        ObjectTier(place, 10_000, "disk")
    tier = ObjectTier(place, 10_000, "disk", wait=False)
    with pytest.raises(TierError, match="no list today"):
        tier.put(name(2), 50, lambda: content(50))
    assert not tier.opened
    place.fails = False
    deadline = time.monotonic() + 30
    status = None
    while status is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        with suppress(TierError):
            status = tier.put(name(2), 50, lambda: content(50)).status
    assert status is PutStatus.KEPT
    assert tier.used_bytes() == 150


def test_the_last_used_goes_last_also_after_a_restart(tmp_path: Path) -> None:
    first = disk_tier(tmp_path, 10_000)
    order = random.Random(3).sample(range(5), 5)
    for number in order:
        first.put(name(number), 1900, lambda: content(1900))
        time.sleep(0.02)
    second = disk_tier(tmp_path, 10_000)
    assert second.put(name(9), 3000, lambda: content(3000)).evicted == (name(order[0]), name(order[1]))

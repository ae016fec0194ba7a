"""`kill -9` at random moments while saving: nothing is broken afterwards, and nothing that was acknowledged is gone."""

import subprocess
import sys
from pathlib import Path

import pytest

from holdover.store.catalog import read_catalog, verify
from holdover.store.objects import disk_tier
from holdover.store.place import folder_place
from tests.store.kills import BUDGET

KILLS, ROUNDS = 200, 10


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path) -> None:
    names: set[str] = set()
    folder = tmp_path / "t"
    for number in range(ROUNDS):
        command = [sys.executable, "-m", "tests.store.kills", str(folder), str(KILLS // ROUNDS), str(1000 * number)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        names |= set(run.stdout.split())
        place = folder_place(folder)
        assert verify(place).whole
        assert names <= read_catalog(place).entries.keys(), "what was acknowledged is gone"
    kept = read_catalog(folder_place(folder)).entries.keys()
    print(f"{KILLS} kills: {len(names):,} segments were acknowledged, {len(kept - names):,} written and not yet")
    assert len(names) > KILLS, "they came to save something"
    assert kept - names, "some were killed while they saved"
    last = disk_tier(folder, BUDGET)
    assert not list(folder.rglob("*#*"))
    assert last.used_bytes() == sum(f.stat().st_size for f in (folder / "segments").rglob("*") if f.is_file())
    last.close()
    command = [sys.executable, "-m", "holdover", "store", "verify", str(folder)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    assert "all whole" in checked.stdout

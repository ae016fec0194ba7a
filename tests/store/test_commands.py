"""`holdover store ...` as a user calls it, on folders that engines have saved into, and on a bucket."""

import json
import os
import random
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from holdover.cli import app
from holdover.errors import HoldoverError
from holdover.store.catalog import read_catalog, to_collect, verify
from holdover.store.command import age, parse_age, parse_place
from holdover.store.encryption import Cipher
from holdover.store.objects import bucket_tier, disk_tier
from holdover.store.place import folder_place
from tests.copies import copies
from tests.engine.harness import Bench
from tests.s3 import BUCKET, S3
from tests.store.test_finding import KINDS, PROMPT, bench, expected

KEY = "c3" * 32
SYSTEM = PROMPT[:64]
OTHER = random.Random(8).choices(range(256), k=90)


def store(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Run a command with --json."""
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["store", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def text(*arguments: object, code: int = 0) -> str:
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["store", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def saved(folder: Path, kind: str = "hybrid", **options: Any) -> Bench:
    """Two sessions with one system prompt, one of two turns."""
    engine = bench(kind, disk_tier(folder, 16 << 20, **options))
    engine.ask(PROMPT, 1, session="alpha")
    engine.ask([*PROMPT, *OTHER], 1, session="alpha")
    engine.ask([*SYSTEM, *OTHER], 1, session="beta")
    engine.store.close()
    return engine


def test_ls_shows_each_history_with_its_session(tmp_path: Path) -> None:
    saved(tmp_path)
    shown = store("ls", tmp_path)["histories"]
    assert {(each["session"], each["tokens"]) for each in shown} == {("alpha", 210), ("beta", 154)}
    segments = store("ls", tmp_path, "--segments")["segments"]
    (chain,) = (each["segments"] for each in shown if each["session"] == "alpha")
    rows = {each["name"]: each["end"] for each in segments if each["kind"] == "rows"}
    snapshots = {each["end"] for each in segments if each["session"] == "alpha" and each["kind"] == "snapshot"}
    assert [rows[each] for each in chain] == sorted(snapshots) == [100, 120, 210], "each snapshot at the end of rows"
    assert len(segments) == len([*(tmp_path / "segments").rglob("*.*.*")])
    assert {each["kind"] for each in segments} == {"rows", "snapshot"}
    said = text("ls", tmp_path)
    assert "alpha" in said
    assert "2 histories in" in said
    assert "the 1 most recent are shown" in text("ls", f"disk:{tmp_path}", "--limit", 1)


def test_stats_counts_what_is_shared(tmp_path: Path) -> None:
    saved(tmp_path)
    found = store("stats", tmp_path)
    assert found["tokens"] == 210 + 90
    assert found["tokens_unshared"] == 210 + 154
    assert found["sharing"] == pytest.approx(364 / 300)
    assert (found["histories"], found["sessions"], found["tenants"], found["orphans"]) == (2, 2, 1, 0)
    assert found["budget_bytes"] == 16 << 20
    assert found["bytes"] == sum(file.stat().st_size for file in (tmp_path / "segments").rglob("*.*.*"))
    assert "shared by 1.21 histories" in text("stats", tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_verify_finds_what_is_broken_and_what_hangs_on_it_and_mends_it(kind: str, tmp_path: Path) -> None:
    saved(tmp_path, kind)
    whole = store("verify", tmp_path)
    assert whole["addresses_checked"] == whole["segments"] > 0
    assert (whole["broken"], whole["orphans"]) == ([], [])
    assert "all whole" in text("verify", tmp_path)
    [first] = [each for each in store("ls", tmp_path, "--segments")["segments"]
               if each["kind"] == "rows" and each["parent"] is None]  # fmt: skip
    file = next((tmp_path / "segments").rglob(first["name"].replace(".", ".*.")))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (file.parent / "notes.txt").write_text("mine")
    found = store("verify", tmp_path, code=1)
    assert [each["name"] for each in found["broken"]] == [first["name"]]
    assert "checksum" in found["broken"][0]["problem"]
    assert len(found["orphans"]) == whole["segments"] - 1
    assert [Path(path).name for path in found["other_formats"]] == ["notes.txt"]
    assert "--repair removes them" in text("verify", tmp_path, code=1)
    repaired = store("verify", tmp_path, "--repair")
    assert repaired["freed_bytes"] > 0
    assert store("verify", tmp_path)["segments"] == 0
    assert (file.parent / "notes.txt").exists(), "what isn't ours is left alone"
    again = bench(kind, disk_tier(tmp_path, 16 << 20))
    assert again.ask(PROMPT) == expected(kind, PROMPT, 4)


def test_verify_knows_tokens_under_another_name(tmp_path: Path) -> None:
    """A whole segment with a checksum that holds, whose tokens are not those of its address."""
    from tests.store.forging import forge_tokens

    saved(tmp_path)
    name = forge_tokens(tmp_path)
    found = store("verify", tmp_path, code=1)
    assert [each["name"] for each in found["broken"]] == [name]
    assert "address" in found["broken"][0]["problem"]


def test_verify_needs_a_tenants_salt_to_check_addresses(tmp_path: Path) -> None:
    engine = bench("hybrid", disk_tier(tmp_path, 16 << 20))
    engine.ask(PROMPT, 1, salt="tenant")
    assert store("verify", tmp_path)["addresses_checked"] == 0
    checked = store("verify", tmp_path, "--salt", "tenant")
    assert checked["addresses_checked"] == checked["segments"]


def test_verify_and_gc_while_an_engine_saves_and_evicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    place = folder_place(tmp_path)
    items = list(place.list())
    root = next(item for item in items if ".0000000000000000.rows" in item.path)
    lists = [[item for item in items if item is not root], items]  # a parent is written while the first list is made
    monkeypatch.setattr(place, "list", lambda: lists.pop(0))
    assert verify(place).whole
    lists = [[item for item in items if item is not root], items]
    assert to_collect(read_catalog(place)) == []
    leaf = next(item for item in items if item.path.endswith(".snapshot"))
    place.delete(leaf.path)  # evicted after the list was made
    lists = [items]
    verdict = verify(place)
    assert verdict.whole
    assert verdict.segments == len(items) - 1


def test_gc_removes_the_oldest_leaf_first_and_another_models_state(tmp_path: Path) -> None:
    saved(tmp_path)
    files = {file: file.stat().st_mtime for file in (tmp_path / "segments").rglob("*.*.*")}
    month_ago = time.time() - 30 * 86400
    beta = [each for each in store("ls", tmp_path, "--segments")["segments"] if each["session"] == "beta"]
    for file in files:
        if any(file.name.startswith(each["name"].split(".")[0]) for each in beta):
            os.utime(file, (month_ago, month_ago))
    plan = store("gc", tmp_path, "--older-than", "8d", "--dry-run")
    assert plan["dry_run"] and {each["name"] for each in plan["segments"]} == {each["name"] for each in beta}
    assert len([*(tmp_path / "segments").rglob("*.*.*")]) == len(files)
    assert store("gc", tmp_path, "--older-than", "8d")["bytes"] == plan["bytes"] > 0
    assert [each["session"] for each in store("ls", tmp_path)["histories"]] == ["alpha"]
    assert store("verify", tmp_path)["orphans"] == []

    bench("dense", disk_tier(tmp_path, 16 << 20)).ask(OTHER, 1, session="gamma")
    models = store("stats", tmp_path)["models"]
    assert len(models) == 2
    gamma = next(each["model"] for each in store("ls", tmp_path)["histories"] if each["session"] == "gamma")
    store("gc", tmp_path, "--keep-model", gamma[:10])
    assert [each["session"] for each in store("ls", tmp_path)["histories"]] == ["gamma"]
    assert store("gc", tmp_path)["segments"] == []


def test_gc_keeps_a_budget_and_an_engine_that_runs_keeps_count(tmp_path: Path) -> None:
    engine = bench("hybrid", disk_tier(tmp_path, 16 << 20))
    engine.ask(PROMPT, 1)
    engine.ask([*PROMPT, *OTHER], 1)
    before = engine.store.tiers[0].used_bytes()
    removed = store("gc", tmp_path, "--budget", before // 2)
    assert engine.store.tiers[0].used_bytes() == before - removed["bytes"] <= before // 2
    assert store("verify", tmp_path)["orphans"] == []
    left = store("ls", tmp_path, "--segments")["segments"]
    rows = sorted((each["start"], each["end"]) for each in left if each["kind"] == "rows")
    assert [0, *(end for _, end in rows[:-1])] == [start for start, _ in rows], "the beginning goes last"
    assert engine.ask([*PROMPT, *OTHER, 1]) == expected("hybrid", [*PROMPT, *OTHER, 1], 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_moves_to_another_machine(kind: str, tmp_path: Path) -> None:
    saved(tmp_path / "here", kind)
    moved = store("export", tmp_path / "here", "alpha", tmp_path / "alpha.tar")
    assert moved["tokens"] == 210
    (tmp_path / "there").mkdir()
    arrived = store("import", tmp_path / "there", tmp_path / "alpha.tar")
    assert (arrived["kept"], arrived["shared"], arrived["refused"]) == (moved["kept"], 0, 0)
    prompt = [*PROMPT, *OTHER, 5, 6]
    engine = bench(kind, disk_tier(tmp_path / "there", 16 << 20))
    assert engine.ask(prompt) == expected(kind, prompt, 4)
    assert engine.engine.counters.prompt_tokens_computed == 2
    again = store("import", tmp_path / "there", tmp_path / "alpha.tar")
    assert (again["kept"], again["refused"]) == (0, 0)
    assert store("verify", tmp_path / "there")["broken"] == []


@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_session_is_cut_anew_where_the_other_machine_has_its_beginning(kind: str, salt: str, tmp_path: Path) -> None:
    here = bench(kind, disk_tier(tmp_path / "here", 16 << 20))
    here.ask(PROMPT, 1, session="alpha", salt=salt)
    here.ask([*PROMPT, *OTHER], 1, session="alpha", salt=salt)
    there = bench(kind, disk_tier(tmp_path / "there", 16 << 20))
    there.ask(PROMPT[:100], 1, salt=salt)
    there.ask([*PROMPT[:110], 7, 7, 7], 1, salt=salt)
    there.store.close()
    store("export", tmp_path / "here", "alpha", tmp_path / "alpha.tar")
    if salt:
        with pytest.raises(HoldoverError, match="--salt"):
            store("import", tmp_path / "there", tmp_path / "alpha.tar")
    arrived = store("import", tmp_path / "there", tmp_path / "alpha.tar", "--salt", salt)
    assert arrived["refused"] == 0
    assert set(copies(tmp_path / "there").values()) == {1}, "law 2 holds"
    checked = store("verify", tmp_path / "there", "--salt", salt)
    assert (checked["broken"], checked["orphans"]) == ([], [])
    assert checked["addresses_checked"] == checked["segments"]
    prompt = [*PROMPT, *OTHER, 5, 6]
    engine = bench(kind, disk_tier(tmp_path / "there", 16 << 20))
    assert engine.ask(prompt, salt=salt) == expected(kind, prompt, 4)
    assert engine.engine.counters.prompt_tokens_computed == 2


def test_what_is_no_session_or_damaged_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "here")
    with pytest.raises(HoldoverError, match="store ls"):
        store("export", tmp_path / "here", "nobody", tmp_path / "x.tar")
    assert not (tmp_path / "x.tar").exists()
    with pytest.raises(HoldoverError, match="no folder"):
        store("ls", tmp_path / "absent")
    (tmp_path / "there").mkdir()
    with pytest.raises(HoldoverError, match="can't be read"):
        store("import", tmp_path / "there", tmp_path / "absent.tar")
    (tmp_path / "rubbish").write_bytes(b"rubbish" * 1000)
    with pytest.raises(HoldoverError, match="can't be read as an exported session"):
        store("import", tmp_path / "there", tmp_path / "rubbish")
    store("export", tmp_path / "here", "alpha", tmp_path / "alpha.tar")
    content = bytearray((tmp_path / "alpha.tar").read_bytes())
    content[2000] ^= 1
    (tmp_path / "bad.tar").write_bytes(content)
    with pytest.raises(HoldoverError, match="damaged"):
        store("import", tmp_path / "there", tmp_path / "bad.tar")
    (tmp_path / "short.tar").write_bytes(content[: len(content) // 3])
    with pytest.raises(HoldoverError):
        store("import", tmp_path / "there", tmp_path / "short.tar")
    assert store("verify", tmp_path / "there")["broken"] == []


def test_import_keeps_to_the_budget(tmp_path: Path) -> None:
    saved(tmp_path / "here")
    store("export", tmp_path / "here", "alpha", tmp_path / "alpha.tar")
    disk_tier(tmp_path / "there", 2000).close()
    arrived = store("import", tmp_path / "there", tmp_path / "alpha.tar", code=1)
    assert arrived["refused"] > 0
    assert store("stats", tmp_path / "there")["bytes"] <= 2000


def test_an_encrypted_place_needs_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "t", cipher=Cipher(KEY))
    with pytest.raises(HoldoverError, match="encrypted"):
        store("ls", tmp_path / "t")
    (tmp_path / "key").write_text(KEY)
    assert len(store("ls", tmp_path / "t", "--encryption-key-file", tmp_path / "key")["histories"]) == 2
    monkeypatch.setenv("HOLDOVER_ENCRYPTION_KEY", KEY)
    whole = store("verify", tmp_path / "t")
    assert whole["addresses_checked"] == whole["segments"] > 0
    store("export", tmp_path / "t", "alpha", tmp_path / "alpha.tar")
    monkeypatch.delenv("HOLDOVER_ENCRYPTION_KEY")
    (tmp_path / "there").mkdir()
    store("import", tmp_path / "there", tmp_path / "alpha.tar")
    assert store("verify", tmp_path / "there")["segments"] > 0


def test_a_bucket_is_looked_at_and_mended_the_same_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    s3 = S3()
    try:
        for variable, value in s3.environment.items():
            monkeypatch.setenv(variable, value)
        url = f"s3://{BUCKET}/commands"
        engine = bench("hybrid", bucket_tier(url, 16 << 20, "s3"))
        engine.ask(PROMPT, 1, session="alpha")
        assert [each["session"] for each in store("ls", url)["histories"]] == ["alpha"]
        assert store("verify", url)["addresses_checked"] == len(store("ls", url, "--segments")["segments"])
        store("export", url, "alpha", tmp_path / "alpha.tar")
        store("import", f"s3://{BUCKET}/commands-elsewhere", tmp_path / "alpha.tar")
        second = bench("hybrid", bucket_tier(f"s3://{BUCKET}/commands-elsewhere", 16 << 20, "s3"))
        assert second.ask([*PROMPT, 1]) == expected("hybrid", [*PROMPT, 1], 4)
        assert second.engine.counters.prompt_tokens_computed == 1
        store("gc", url, "--budget", 1)
        assert store("ls", url, "--segments")["segments"] == []
    finally:
        s3.stop()


def test_the_command_line_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "holdover", "store", "gc", str(tmp_path), "--older-than", "soon"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr == "holdover: --older-than 'soon' is no age; write it like 12h, 30d or 8w.\n"


def test_places_and_ages() -> None:
    assert parse_place("/var/lib/x").place == "/var/lib/x"
    assert parse_place("disk:/var/lib/x:3GiB").budget_bytes == 3 << 30
    assert parse_place("s3://bucket/x").kind == "s3"
    with pytest.raises(HoldoverError, match="memory"):
        parse_place("memory:1GiB")
    assert parse_age("1.5h") == 5400
    assert [age(seconds) for seconds in (0, 59, 7200, 15 * 86400)] == ["0s", "59s", "2h", "2w"]


def test_what_a_client_calls_its_session_is_only_text(tmp_path: Path) -> None:
    engine = bench("hybrid", disk_tier(tmp_path, 16 << 20))
    name = "[/red]\x1b[2J[bold]"
    engine.ask(PROMPT, 1, session=name)
    assert "[/red]?[2J[bold]" in text("ls", tmp_path).replace("\n", "")
    assert "[/red]?[2J[bold]" in text("ls", tmp_path, "--segments")
    text("export", tmp_path, name, tmp_path / "x.tar")
    assert (tmp_path / "x.tar").stat().st_mode & 0o777 == 0o600


def test_a_tar_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        link = tarfile.TarInfo("segments")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(HoldoverError, match="something else"):
        store("import", tmp_path / "there", tmp_path / "link.tar")

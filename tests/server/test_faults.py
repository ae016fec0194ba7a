"""Real faults of real parts under a running server: no wrong token, no hang, a log line and a metric, and then saving
resumes by itself."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3 import BUCKET, FaultyS3
from tests.server.running import RunningServer
from tests.server.test_tiers import ask, saved_again

OPTIONS = ("--device-memory", "4MiB", "--tier", "memory:64KiB")


class Mount:
    """A tmpfs of its own, with a size that can be changed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.mount("-t", "tmpfs", "-o", "size=256k", "none")

    def mount(self, *options: str) -> None:
        subprocess.run(["mount", *options, str(self.folder)], check=True, capture_output=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True, capture_output=True)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    try:
        made = Mount(tmp_path / "disk")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine lets nobody mount a file system: {error}")
    yield made
    made.unmount()


def warnings(server: RunningServer) -> list[str]:
    server.stop()
    return [line for line in server.lines if "WARNING" in line]


def test_a_file_system_that_is_full(mount: Mount) -> None:
    with RunningServer("oracle:everything", *OPTIONS, "--tier", f"disk:{mount.folder}/state:64MiB") as server:
        for first in range(12):
            ask(server, [first, *range(200)])
            ask(server, [first, *range(200), 1, 2])
        server.wait_for("holdover_saves_under_way", 0)
        assert server.metric("holdover_tier_faults_total") >= 1
        assert not list((mount.folder / "state").rglob("*#*")), "what could not be written whole is gone"
        ask(server, [0, *range(200), 1, 2, 3])
        mount.mount("-o", "remount,size=16m")
        assert saved_again(server, 60)
        ask(server, [3, *range(200), 1, 2, 3])
        said = warnings(server)
    assert any("No space left" in line and str(mount.folder) in line and "next try in 5 s" in line for line in said)


def test_a_file_system_that_is_remounted_read_only(mount: Mount) -> None:
    mount.mount("-o", "remount,size=16m")
    with RunningServer("oracle:everything", *OPTIONS, "--tier", f"disk:{mount.folder}/state:64MiB") as server:
        ask(server, list(range(200)))
        server.wait_for("holdover_saves_under_way", 0)
        mount.mount("-o", "remount,ro")
        for first in range(4):
            ask(server, [first, *range(50, 250)])
        ask(server, [*range(200), 1, 2])
        server.wait_for("holdover_saves_under_way", 0)
        assert server.metric("holdover_tier_faults_total") >= 1
        mount.mount("-o", "remount,rw")
        assert saved_again(server, 60)
        said = warnings(server)
    assert any("Read-only file system" in line for line in said)
    with RunningServer("oracle:everything", *OPTIONS, "--tier", f"disk:{mount.folder}/state:64MiB") as server:
        assert ask(server, list(range(200)))["reused"].get("disk", 0) > 0


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign", "empty"])
def test_files_that_are_damaged_while_a_server_runs(damage: str, tmp_path: Path) -> None:
    rng = random.Random(damage)
    device = ("--device-memory", "12KiB", "--max-running", "1")
    with RunningServer("oracle:everything", *device, "--tier", f"disk:{tmp_path}:64MiB") as server:
        for first in range(6):
            ask(server, [first, *range(200)])
        server.wait_for("holdover_saves_under_way", 0)
        files = sorted((tmp_path / "segments").rglob("*.*.*"))
        contents = {file: file.read_bytes() for file in files}
        for file in files:
            content = bytearray(contents[file])
            if damage == "flip":
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            elif damage == "cut":
                del content[rng.randrange(len(content)) :]
            elif damage == "foreign":
                content = bytearray(contents[rng.choice([each for each in files if each != file])])
            else:
                content = bytearray()
            file.write_bytes(content)
        for first in range(6):
            ask(server, [first, *range(200), 1, 2])
        server.wait_for("holdover_saves_under_way", 0)
        assert server.metric("holdover_tier_damaged_total") >= 1
        assert saved_again(server, 60)
        assert any("checksum" in line or "removing" in line for line in warnings(server))
    command = [sys.executable, "-m", "holdover", "store", "verify", str(tmp_path), "--repair"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def faulty() -> Iterator[FaultyS3]:
    server = FaultyS3()
    yield server
    server.close()


@pytest.mark.parametrize("status", [503, 429, 500])
def test_a_bucket_that_refuses(status: int, faulty: FaultyS3) -> None:
    options = (*OPTIONS, "--tier", f"s3://{BUCKET}/served")
    with RunningServer("oracle:everything", *options, environment=faulty.environment) as server:
        ask(server, list(range(200)))
        server.wait_for("holdover_saves_under_way", 0)
        faulty.refuse = status
        for first in range(4):
            ask(server, [first, *range(50, 250)])
        ask(server, list(range(200)))
        server.wait_for("holdover_saves_under_way", 0)
        assert faulty.refused >= 1
        assert server.metric("holdover_tier_faults_total") >= 1
        faulty.refuse = 0
        assert saved_again(server, 60)
        said = warnings(server)
    assert any("s3" in line and "next try in 5 s" in line for line in said)
    assert not any("very-secret" in line for line in server.lines)


def test_a_bucket_that_is_slow_holds_up_nobody(faulty: FaultyS3) -> None:
    options = (*OPTIONS, "--tier", f"s3://{BUCKET}/served")
    with RunningServer("oracle:everything", *options, environment=faulty.environment) as server:
        faulty.delay = 0.4
        for first in range(6):
            ask(server, [first, *range(200)])
        server.wait_for("holdover_saves_under_way", 0, 60)
        assert server.metric("holdover_tier_faults_total") == 0, "slow is no fault"
    with RunningServer("oracle:everything", *OPTIONS, "--tier", f"s3://{BUCKET}/served",
                       "--find-wait", "30", environment=faulty.environment) as server:  # fmt: skip
        assert ask(server, [3, *range(200)])["reused"] == {"s3": 201}


def test_a_clock_that_jumps(tmp_path: Path) -> None:
    """Only the wall clock, as when a machine's time is set: decisions are made by the other one."""
    faketime = pytest.importorskip("libfaketime")
    moment = tmp_path / "now"
    moment.write_text("+0\n")
    library = faketime.get_reload_information()[1]
    environment = {
        "LD_PRELOAD": library["LD_PRELOAD"], "LD_LIBRARY_PATH": library["LD_LIBRARY_PATH"],
        "FAKETIME_TIMESTAMP_FILE": str(moment), "FAKETIME_NO_CACHE": "1", "DONT_FAKE_MONOTONIC": "1",
    }  # fmt: skip
    place = f"disk:{tmp_path}/state:64MiB"
    with RunningServer("oracle:everything", *OPTIONS, "--tier", place, environment=environment) as server:
        for first, jump in enumerate(("+0", "+3650d", "-400d", "+1d", "-3650d"), start=100):
            moment.write_text(jump + "\n")
            ask(server, [first, *range(200)])
            ask(server, [first, *range(200), 1, 2])
            assert saved_again(server, 30)
        server.wait_for("holdover_saves_under_way", 0)
        assert server.metric("holdover_tier_faults_total") == 0
    with RunningServer("oracle:everything", *OPTIONS, "--tier", place, environment=os.environ.copy()) as server:
        assert ask(server, [100, *range(200)])["reused"] == {"disk": 201}

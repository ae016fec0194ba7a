"""A server whose tiers restart, fail, fill up and hang, with every kind of state (`oracle:everything`)."""

import os
import resource
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.s3 import BUCKET, S3, HangingS3
from tests.server.running import RunningServer
from tests.simulation.reference import Reference

BODY = {"prompt": list(range(200)), "max_tokens": 4, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
RIGHT = Reference("everything")


@pytest.fixture
def s3() -> Iterator[S3]:
    server = S3()
    yield server
    server.stop()


def ask(server: RunningServer, prompt: list[int]) -> dict[str, dict[str, int]]:
    """Ask, and require the oracle's answer. Returns what was reused and computed."""
    status, answer = server.post("/v1/completions", {**BODY, "prompt": prompt})
    assert status == 200, answer
    assert answer["choices"][0]["token_ids"] == RIGHT.answer(prompt, 4)
    return answer["usage"]["holdover"]


def saved_again(server: RunningServer, seconds: float) -> bool:
    """Whether saving resumes: new prompts are asked until more bytes are saved."""
    before = server.metric("holdover_tier_bytes_saved_total")
    deadline = time.monotonic() + seconds
    number = 0
    while server.metric("holdover_tier_bytes_saved_total") == before:
        if time.monotonic() > deadline:
            return False
        number += 1
        ask(server, [number, *range(100)])
        time.sleep(0.5)  # a tier that has failed is left alone for seconds
    return True


def test_a_server_on_a_bucket_resumes_after_a_restart_and_outlives_an_outage(s3: S3) -> None:
    options = ("--device-memory", "4MiB", "--tier", "memory:64KiB", "--tier", f"s3://{BUCKET}/served:1GiB")
    with RunningServer("oracle:everything", *options, environment=s3.environment) as server:
        assert any("memory 64.0 KiB, s3://state/served 1.0 GiB" in line for line in server.lines)
        ask(server, list(range(200)))
        server.wait_for("holdover_saves_under_way", 0)
    only = ("--device-memory", "4MiB", "--tier", f"s3://{BUCKET}/served")
    with RunningServer("oracle:everything", *only, environment=s3.environment) as server:
        assert ask(server, list(range(200)))["reused"] == {"s3": 200}
        s3.stop()
        ask(server, list(range(50, 250)))
        server.wait_for("holdover_saves_under_way", 0)
        assert server.metric("holdover_tier_faults_total") >= 1
        s3.start()
        assert saved_again(server, 60)
        ask(server, list(range(50, 250)))
        assert "very-secret" not in "\n".join(server.lines)


def test_a_bucket_that_hangs_holds_up_nobody() -> None:
    """It takes connections and says nothing, in the middle of saving, deleting and loading."""
    s3 = HangingS3()
    try:
        options = ("--device-memory", "256KiB", "--max-running", "2", "--tier", f"s3://{BUCKET}/served")
        with RunningServer("oracle:everything", *options, environment=s3.environment) as server:
            prompt = list(range(150))
            for turn in range(12):
                prompt = [*prompt, turn, turn + 1]
                ask(server, prompt)
            server.wait_for("holdover_saves_under_way", 0)
            s3.hang()
            slowest = 0.0
            for turn in range(40):  # saves, saved snapshots that are thinned, state that is evicted
                prompt = [*prompt, turn, turn + 1] if turn % 8 != 7 else [turn, *range(150)]
                begin = time.monotonic()
                ask(server, prompt)
                slowest = max(slowest, time.monotonic() - begin)
            assert slowest < 5, f"a request took {slowest:.1f} s; the bucket is given 60"
            s3.go_on()
            assert saved_again(server, 120)
            server.wait_for("holdover_saves_under_way", 0)
            ask(server, prompt)
    finally:
        s3.close()


def test_a_server_killed_while_saving_goes_on_from_what_is_whole(tmp_path: Path) -> None:
    options = ("--device-memory", "4MiB", "--tier", f"disk:{tmp_path}/state:64MiB")
    reused = 0
    for life in range(8):
        with RunningServer("oracle:everything", *options) as server:
            if life:
                reused += ask(server, list(range(life - 1, life + 199)))["reused"].get("disk", 0)
            for extra in range(life + 1):
                ask(server, [*range(life, life + 200), *range(extra)])
            os.kill(server.children()[0], signal.SIGKILL)  # the engine, with its savers at work
            assert server.process.wait(20) == 2
    assert reused > 0, "most of what was acknowledged is there"


def test_a_disk_that_fills_up_costs_nothing_but_reuse(tmp_path: Path) -> None:
    options = ("--device-memory", "4MiB", "--tier", "memory:1MiB", "--tier", f"disk:{tmp_path}/state:64MiB")
    with RunningServer("oracle:everything", *options) as server:
        ask(server, list(range(200)))
        server.wait_for("holdover_saves_under_way", 0)
        engine = server.children()[0]
        usual = resource.prlimit(engine, resource.RLIMIT_FSIZE)
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (1000, usual[1]))  # writes past that fail, as on a full disk
        for first in range(5):
            ask(server, [first, *range(200)])
            ask(server, [first, *range(200), 1, 2])
        server.wait_for("holdover_saves_under_way", 0)
        assert server.metric("holdover_tier_faults_total") >= 1
        resource.prlimit(engine, resource.RLIMIT_FSIZE, usual)
        assert saved_again(server, 60)


def test_a_client_that_goes_away_leaves_nothing_behind(tmp_path: Path) -> None:
    options = ("--device-memory", "1MiB", "--tier", f"disk:{tmp_path}/state:64MiB")
    with RunningServer("oracle:everything", *options) as server:
        for first in range(6):
            body = {**BODY, "prompt": [first, *range(200)], "max_tokens": 2000, "stream": True}
            request = urllib.request.Request(server.url + "/v1/completions", msgspec.json.encode(body))
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=30) as response:
                response.read(1)
        server.wait_for("holdover_requests_running", 0)
        server.wait_for("holdover_saves_under_way", 0)
        server.wait_for("holdover_leases", 0)
        ask(server, list(range(200)))


@pytest.mark.parametrize("mode", ["lazy", "auto", "eager"])
def test_a_server_that_is_stopped_saves_what_was_to_be_saved_later(mode: str, tmp_path: Path) -> None:
    options = ("--tier", f"disk:{tmp_path}/state:64MiB", "--save", mode)
    with RunningServer("oracle:everything", *options) as server:
        ask(server, list(range(200)))
        if mode == "lazy":
            assert server.metric("holdover_turns_to_save") == 1
            assert server.metric("holdover_tier_segments_saved_total") == 0
        assert server.stop() < 5
    with RunningServer("oracle:everything", *options) as server:
        assert ask(server, list(range(200)))["reused"] == {"disk": 200}

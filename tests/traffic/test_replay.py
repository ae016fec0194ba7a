"""Replay against the real server, through the command line."""

import json
import socket
import threading
from pathlib import Path

import pytest

from holdover.errors import TraceError
from holdover.traffic.replay import ReplayOptions, TurnResult, base_url, request_body, think_time
from holdover.traffic.report import percentiles, summarise
from holdover.traffic.trace import Session, Turn
from tests.server.running import RunningServer
from tests.server.test_lifecycle import assert_refused, run_cli
from tests.traffic.test_importers import DATA


def test_replay_of_block_ids_counts_what_the_server_counts(server: RunningServer, tmp_path: Path) -> None:
    computed = server.metric("holdover_prompt_tokens_computed_total")
    report_path = tmp_path / "report.json"
    done = run_cli(
        "replay", str(DATA / "weka-sessions.jsonl.xz"), "--url", server.url, "--agents", "4", "--sessions", "4",
        "--turns", "3", "--shrink", "64", "--think-scale", "0", "--json", str(report_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(report_path.read_text())
    assert (report["turns"], report["failed_turns"]) == (12, 0)
    tokens = report["prompt_tokens"]
    assert tokens["sent"] == tokens["reused"] + tokens["computed"]
    assert tokens["computed"] == server.metric("holdover_prompt_tokens_computed_total") - computed
    assert sum(tokens["reused_by_place"].values()) == tokens["reused"]
    assert report["turns_per_hour"] > 0
    assert set(report["ttft_ms"]) == {"p50", "p95", "p99"}
    assert "turns per hour" in done.stdout


def test_replay_of_text_goes_through_chat(server: RunningServer) -> None:
    done = run_cli(
        "replay", str(DATA / "tau-bench-airline.jsonl.xz"), "--url", server.url + "/v1", "--agents", "2", "--sessions", "2",  # noqa: E501
        "--turns", "2", "--think-scale", "0", "--json", "-",
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert (report["turns"], report["failed_turns"]) == (4, 0)
    assert report["prompt_tokens"]["reused"] > 1000, "the shared system prompt"


def test_replay_refuses_what_it_cannot_do(tmp_path: Path, server: RunningServer) -> None:
    trace = str(DATA / "weka-sessions.jsonl.xz")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert_refused(run_cli("replay", trace, "--url", nobody), "no server answers")
    assert_refused(run_cli("replay", trace, "--url", "ftp://x"), "http://")
    (tmp_path / "no.json").write_text("{}")
    assert_refused(run_cli("replay", str(tmp_path / "no.json"), "--url", server.url), "no kind that is known")
    assert_refused(run_cli("replay", trace, "--url", server.url, "--shrink", "5"), "--shrink")


def test_a_server_that_answers_nonsense_fails_turns_not_the_replay() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for body in (b'{"data": [{"id": "m"}]}', b"garbage"):
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    done = run_cli("replay", str(DATA / "tau-bench-airline.jsonl.xz"), "--url", url, "--sessions", "1", "--turns", "1")
    listener.close()
    assert_refused(done, "no turn ended well")


def test_think_times_are_cut_and_scaled() -> None:
    turn = Turn(1, think_seconds=500.0, token_ids=(1,))
    assert think_time(turn, ReplayOptions(1, think_scale=0.5)) == 250.0
    assert think_time(turn, ReplayOptions(1, think_scale=0.5, think_limit=60.0)) == 30.0


def test_bodies_ask_for_what_was_recorded() -> None:
    route, body = request_body(Session("s", ()), Turn(7, token_ids=(1, 2)), ReplayOptions(1, model="m"))
    assert route == "/v1/completions"
    assert (body["prompt"], body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == ((1, 2), 7, 7, True)
    route, body = request_body(
        Session("s", ()), Turn(7, messages=({"role": "user"},)), ReplayOptions(1, fixed_length=False)
    )
    assert route == "/v1/chat/completions"
    assert "ignore_eos" not in body
    assert base_url("http://x:1/v1/") == "http://x:1"
    with pytest.raises(TraceError):
        base_url("x:1")


def test_failed_turns_are_counted_apart() -> None:
    good = TurnResult(
        "a",
        0,
        0.0,
        ttft=0.1,
        duration=0.5,
        gaps=[0.02, 0.04],
        prompt_tokens=10,
        output_tokens=3,
        cached_tokens=4,
        computed=6,
    )
    report = summarise([good, TurnResult("a", 1, 0.5, error="HTTP 500")], 2.0, "t", {})
    assert (report["turns"], report["failed_turns"], report["first_error"]) == (1, 1, "HTTP 500")
    assert report["turns_per_hour"] == 1800.0
    assert report["inter_token_ms"]["p50"] == 30.0
    assert percentiles([]) == {"p50": None, "p95": None, "p99": None}

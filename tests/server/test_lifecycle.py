"""Starting, stopping, clients that go, state that survives: with real processes."""

import http.client
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlparse

import pytest

from holdover.store.queues import RETRY_AFTER_FAULT_SECONDS
from tests.checkpoints import edit_config, save_checkpoint
from tests.server.running import RunningServer


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process is left behind"
        time.sleep(0.05)


def long_stream(server: RunningServer) -> http.client.HTTPResponse:
    """A request whose answer is still being made, with its first event read. Closing the response hangs up."""
    where = urlparse(server.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
    body = {"prompt": list(range(300, 420)), "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.readline().startswith(b"data:")
    connection.close()  # the response holds the socket now
    return response


def test_a_client_that_goes_in_mid_stream_frees_its_slots_and_leases_at_once(server: RunningServer) -> None:
    server.wait_for("holdover_requests_running", 0)
    response = long_stream(server)
    assert server.metric("holdover_requests_running") == 1
    response.close()
    server.wait_for("holdover_requests_running", 0, seconds=3)
    server.wait_for("holdover_leases", 0, seconds=3)


def test_a_client_that_goes_before_its_whole_answer_is_cancelled_too(server: RunningServer) -> None:
    where = urlparse(server.url)
    sock = socket.create_connection((where.hostname, where.port))
    body = json.dumps({"prompt": list(range(500, 600)), "max_tokens": 20_000, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    sock.sendall(head + body)
    server.wait_for("holdover_requests_running", 1)
    sock.close()
    server.wait_for("holdover_requests_running", 0, seconds=3)
    server.wait_for("holdover_leases", 0, seconds=3)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everything_in_under_five_seconds(demo_folder: Path, how: int) -> None:
    server = RunningServer(demo_folder, "--device-memory", "64MiB")
    pids = [server.process.pid, *server.children()]
    assert len(pids) == 2
    response = long_stream(server)
    assert server.stop(how) < 5
    wait_gone(pids, 1)
    response.close()


def test_a_killed_server_takes_its_engine_with_it(demo_folder: Path) -> None:
    server = RunningServer(demo_folder, "--device-memory", "64MiB")
    engine = server.children()
    server.stop(signal.SIGKILL)
    wait_gone(engine, 6)


def test_a_killed_engine_fails_requests_clearly_and_ends_the_server(demo_folder: Path) -> None:
    server = RunningServer(demo_folder, "--device-memory", "64MiB")
    response = long_stream(server)
    os.kill(server.children()[0], signal.SIGKILL)
    assert server.process.wait(10) == 2
    assert any("the engine has ended" in line for line in [*server.lines, server.process.stdout.read()])
    response.close()


def test_state_on_disk_survives_a_restart_to_the_token(demo_folder: Path, tmp_path: Path) -> None:
    options = ("--dtype", "float32", "--device-memory", "64MiB", "--disk-tier", f"{tmp_path}/state:100MiB")
    body = {"prompt": list(range(300, 500)), "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    longer = {**body, "prompt": [*body["prompt"], 7, 8, 9]}
    with RunningServer(demo_folder, *options) as server:
        server.post("/v1/completions", body)
        expected = server.post("/v1/completions", {**longer, "cache_salt": "computed anew"})[1]
        server.wait_for("holdover_saves_under_way", 0)
    with RunningServer(demo_folder, *options, "--memory-tier", "none") as server:
        answer = server.post("/v1/completions", longer)[1]
        assert answer["usage"]["holdover"] == {"computed": 3, "reused": {"disk": 200}}
        assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    with RunningServer(demo_folder, "--dtype", "bfloat16", *options[2:]) as server:
        answer = server.post("/v1/completions", longer)[1]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, (
            "state of another dtype is not this state"
        )


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "holdover", *arguments], capture_output=True, text=True, timeout=60)


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One clear line on standard error, and exit code 2."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("holdover: ")]
    assert len(lines) == 1
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[0]


def test_bad_models_are_refused_in_one_line(tmp_path: Path) -> None:
    assert_refused(run_cli("serve", str(tmp_path / "absent"), "--port", "0"), "no model folder")
    assert_refused(run_cli("serve", str(tmp_path), "--port", "0"), "no config.json")
    (tmp_path / "config.json").write_text("{broken")
    assert_refused(run_cli("serve", str(tmp_path), "--port", "0"), "cannot be read")
    (tmp_path / "config.json").write_text('{"model_type": "gpt17"}')
    assert_refused(run_cli("serve", str(tmp_path), "--port", "0"), "gpt17", "kimi_linear", "qwen3_next")


def test_broken_checkpoints_are_refused_in_one_line(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "sharded", "qwen3", shard="60KB")
    shards = sorted((tmp_path / "sharded").glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()
    assert_refused(run_cli("serve", str(tmp_path / "sharded"), "--port", "0"), "lacks", shards[0].name)
    save_checkpoint(tmp_path / "settings", "qwen3")
    edit_config(tmp_path / "settings", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
    assert_refused(
        run_cli("serve", str(tmp_path / "settings"), "--port", "0"),
        "rope settings",
        "yarn",
        "original_max_position_embeddings",
    )
    assert_refused(run_cli("serve", str(tmp_path / "settings"), "--port", "0", "--dtype", "int3"), "int3", "float32")
    save_checkpoint(tmp_path / "shape", "kimi_linear")
    edit_config(tmp_path / "shape", hidden_size=32)
    assert_refused(run_cli("serve", str(tmp_path / "shape"), "--port", "0"), "shape")


def test_bad_settings_are_refused_in_one_line(demo_folder: Path, tmp_path: Path) -> None:
    model = str(demo_folder)
    assert_refused(run_cli("serve", model, "--device-memory", "lots"), "--device-memory", "2GiB")
    assert_refused(run_cli("serve", model, "--port", "0", "--device-memory", "10KiB"), "too small", "--device-memory")
    assert_refused(run_cli("serve", model, "--disk-tier", "nowhere"), "DIR:SIZE")
    (tmp_path / "file").write_text("")
    assert_refused(run_cli("serve", model, "--port", "0", "--disk-tier", f"{tmp_path}/file/x:1GiB"), "can't be written")
    assert_refused(run_cli("serve", model, "--port", "0", "--context-length", "999999999"), "--context-length")
    assert_refused(run_cli("serve", model, "--port", "70000"), "--port")
    assert_refused(run_cli("serve", model, "--port", "0", "--device", "cuda"), "no GPU")
    assert run_cli("serve", model, "--max-running", "0").returncode == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_refused(run_cli("serve", model, "--port", port), "is in use", "--port")


def test_every_option_is_an_environment_variable_too(demo_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdover", "serve", str(demo_folder)],
        env={**os.environ, "HOLDOVER_SERVE_DEVICE_MEMORY": "lots"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert_refused(done, "--device-memory", "lots")


def test_a_killed_server_leaves_no_sockets_behind(demo_folder: Path, tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    server = RunningServer(demo_folder, "--device-memory", "64MiB", environment=environment)
    children = server.children()
    server.stop(signal.SIGKILL)
    wait_gone(children, 5)
    assert not list(tmp_path.glob("holdover-*"))


def test_a_disk_that_stops_taking_writes_in_mid_run_costs_nothing_but_reuse(demo_folder: Path, tmp_path: Path) -> None:
    options = ("--device-memory", "64MiB", "--memory-tier", "none", "--disk-tier", f"{tmp_path}/tier:1GiB")
    with RunningServer(demo_folder, "--dtype", "float32", *options) as server:
        prompt = [300 + i % 97 for i in range(400)]

        def answer(first: int) -> list[int]:
            body = {"prompt": [first, *prompt], "max_tokens": 6, "temperature": 0, "return_token_ids": True}
            status, found = server.post("/v1/completions", body)
            assert status == 200, found
            return list(found["choices"][0]["token_ids"])

        before = answer(1000)
        server.wait_for("holdover_saves_under_way", 0)
        saved = server.metric("holdover_tier_bytes_saved_total")
        assert saved > 0
        engine = server.children()[0]
        usual = resource.prlimit(engine, resource.RLIMIT_FSIZE)
        # Every write past byte 1,000 of a file now fails, as on a full disk.
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (1000, usual[1]))
        other = answer(2000)
        server.wait_for("holdover_saves_under_way", 0)
        assert server.metric("holdover_tier_bytes_saved_total") == saved
        assert server.metric("holdover_tier_faults_total") >= 1
        assert answer(1000) == before and answer(2000) == other
        server.wait_for("holdover_leases", 0)
        kept = [path.name for path in (tmp_path / "tier/segments").rglob("*") if path.is_file()]
        assert kept and all(re.fullmatch(r"[0-9a-f]{64}\.[0-9a-f]{16}\.(rows|snapshot)", name) for name in kept), (
            "a half file is left"
        )
        resource.prlimit(engine, resource.RLIMIT_FSIZE, usual)
        deadline = time.monotonic() + 2 * RETRY_AFTER_FAULT_SECONDS
        for first in itertools.count(3000):  # the disk is well again: soon it is used again
            assert time.monotonic() < deadline, "the disk is well and nothing is saved to it"
            answer(first)
            server.wait_for("holdover_saves_under_way", 0)
            if server.metric("holdover_tier_bytes_saved_total") > saved:
                break

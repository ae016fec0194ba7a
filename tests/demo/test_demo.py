"""The demo: its parts, and a whole small run of it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdover.config import SaveMode
from holdover.demo.model import CONFIG, demo_text
from holdover.demo.resave_engine import plan_whole
from holdover.demo.traffic import demo_sessions, distinct_prefix_positions
from holdover.engine.deferred import Saving
from holdover.errors import HoldoverError
from holdover.models.base import Model
from holdover.models.registry import load_model
from holdover.store.memory import MemoryTier
from tests.engine.harness import Bench
from tests.engine.test_reuse import fresh, prompt
from tests.server.test_lifecycle import wait_gone

MODE_FIELDS = {
    "turns_per_hour", "output_tokens_per_second", "prompt_tokens", "prompt_tokens_computed", "bytes_saved",
    "bytes_new_state", "max_copies", "ttft_ms", "wall_s",
}  # fmt: skip
FIELDS = {
    "schema", "agents", "turns", "model", "device_budget_bytes", "modes", "speedup", "reuse_efficiency",
    "write_amplification", "copies", "outputs_identical",
}  # fmt: skip


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12))
def test_the_ideal_cache_computes_each_distinct_prefix_once(prompts: list[list[int]]) -> None:
    distinct = {tuple(tokens[: i + 1]) for tokens in prompts for i in range(len(tokens))}
    assert distinct_prefix_positions(prompts) == len(distinct)


def test_the_demos_model_has_the_shape_of_kimi_linear(demo_folder: Path) -> None:
    model = load_model(demo_folder, "bfloat16")
    linear = CONFIG["linear_attn_config"]
    assert len(linear["kda_layers"]) == 3 * len(linear["full_attn_layers"])
    assert 20e6 < (demo_folder / "model.safetensors").stat().st_size / 2 < 30e6
    assert not model.layout.resumes_anywhere
    assert len(demo_text()) > 1000


def test_sessions_are_cut_and_unknown_traffic_is_refused() -> None:
    sessions = demo_sessions("weka", 5, 3, 8192, 32)
    assert [len(session.turns) for session in sessions] == [3] * 5
    with pytest.raises(HoldoverError, match="weka or tau-bench"):
        demo_sessions("none", 5, 3, 8192, 32)


def test_resave_stores_every_turn_whole_and_holdover_does_not(hybrid: Model) -> None:
    copies, saved = [], []
    for planner in (None, plan_whole):
        options = {} if planner is None else {"saving": Saving(planner, SaveMode.EAGER)}
        bench = Bench(hybrid, tiers=(MemoryTier(32 << 20),), **options)
        history = prompt(1, 60)
        for turn in range(4):
            bench.ask(history, 2, session="s")
            history = [*history, *prompt(turn, 10)]
        assert bench.ask(history) == fresh(hybrid, history, 4)
        copies.append(bench.engine.exchange.audits["memory"].max_copies)
        saved.append(bench.engine.counters.tiers["memory"].bytes_saved)
    assert copies[0] == 1
    assert copies[1] >= 4
    assert saved[1] > 1.5 * saved[0]


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that these started."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def test_ctrl_c_ends_the_demo_and_all_its_processes_in_under_five_seconds(demo_folder: Path, tmp_path: Path) -> None:
    assert demo_folder.exists()
    demo = subprocess.Popen(
        [sys.executable, "-m", "holdover", "demo", "--quick", "--agents", "4", "--report", str(tmp_path / "x.html")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 180
    while len(pids := descendants(demo.pid)) < 8:  # four servers, each with its engine
        assert demo.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    begin = time.monotonic()
    demo.send_signal(signal.SIGINT)
    assert demo.wait(20) == 130
    wait_gone(pids, max(0.0, 5 - (time.monotonic() - begin)))
    assert time.monotonic() - begin < 5


@pytest.mark.slow
@pytest.mark.parametrize("traffic", ["weka", "tau-bench"])
def test_a_small_demo_run_measures_and_checks_everything(tmp_path: Path, traffic: str) -> None:
    figures, report = tmp_path / "demo.json", tmp_path / "demo.html"
    done = subprocess.run(
        [sys.executable, "-m", "holdover", "demo", "--quick", "--check", "--agents", "6", "--traffic", traffic,
         "--json", str(figures), "--report", str(report)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    body = json.loads(figures.read_text())
    assert set(body) == FIELDS
    assert body["schema"] == "holdover.demo/1"
    assert list(body["modes"]) == ["recompute", "resave", "holdover", "unlimited"]
    assert all(set(mode) == MODE_FIELDS for mode in body["modes"].values())
    assert set(body["speedup"]) == {"vs_recompute", "vs_resave", "of_unlimited"}
    assert body["outputs_identical"] is True
    assert body["copies"] == 1
    assert body["write_amplification"] <= 1.03
    assert body["reuse_efficiency"] >= 0.95
    assert body["modes"]["resave"]["max_copies"] > 1
    assert body["modes"]["recompute"]["prompt_tokens_computed"] > body["modes"]["holdover"]["prompt_tokens_computed"]
    page = report.read_text()
    assert (
        "http://" not in page.replace("http://www.w3.org", "").replace("http://json-schema", "")
        or "<script src" not in page
    )
    assert "<script src=" not in page
    assert "holdover" in page

"""`holdover doctor` says what a model is, and whether reuse is right here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdover import doctor
from holdover.errors import HoldoverError
from holdover.models.base import Batch
from holdover.models.registry import load_model
from holdover.state.pool import DevicePool
from tests.checkpoints import KINDS, save_checkpoint


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdover", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_architecture_passes(kind: str, dtype: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, kind)
    report = doctor.examine(str(tmp_path), dtype, "cpu", 1 << 30)
    assert report.passed, report.checks
    assert (report.model_type, report.dtype, len(report.checks)) == (kind, dtype, 4)
    assert report.weight_bytes > 4 * report.parameters > 100_000
    assert sum(report.kinds_of_state.values()) == len(load_model(tmp_path, dtype).layout.describe())


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "granitemoehybrid")
    shown = run(str(tmp_path))
    assert shown.returncode == 0
    assert "granitemoehybrid" in shown.stdout
    assert "another engine goes on from saved state: 57 of 57 tokens reused" in shown.stdout
    found = json.loads(run(str(tmp_path), "--json", "--device-memory", "64MiB").stdout)
    assert found["schema"] == "holdover.doctor/1"
    assert found["passed"] is True
    assert found["tokens_that_fit"] == (64 << 20) // found["bytes_per_token"]
    assert found["kinds_of_state"] == {
        "keys and values of all tokens": 1, "recurrent": 3, "convolution tails": 3, "last hidden vector": 1,
    }  # fmt: skip


def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    failed = run(str(tmp_path / "none"))
    assert failed.returncode == 2
    assert failed.stderr.strip().splitlines()[-1].startswith("holdover: there is no model folder")


def test_a_model_that_forgets_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path, "qwen3_next")
    model = load_model(tmp_path, "float32")
    forward = model.forward

    def forgetful(batch: Batch, pool: DevicePool) -> torch.Tensor:
        for row in batch.live_rows.tolist():
            pool.live_views["layers.0.recurrent"][row] = 0
        return forward(batch, pool)

    monkeypatch.setattr(model, "forward", forgetful)
    monkeypatch.setattr(doctor, "load_model", lambda *_: model)
    assert doctor.run_doctor(str(tmp_path), "float32", "cpu", 1 << 30, as_json=False) == 1
    assert "FAIL the next turn computes what is new: tokens" in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_said(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(HoldoverError, match="finds no GPU"):
        doctor.examine(str(tmp_path), "auto", "cuda", 1 << 30)

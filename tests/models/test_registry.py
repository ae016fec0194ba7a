"""The registry, its page, and checkpoints that hold more than a language model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdover.errors import ModelError
from holdover.models.registry import MODELS, load_model
from tests.checkpoints import KINDS, save_checkpoint
from tests.models.table import PAGE, page
from tests.models.test_parity import Feeder

WHOLE = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}  # by type: that of its language model


def test_every_type_is_tested_and_on_the_page() -> None:
    assert set(MODELS) == set(KINDS) | set(WHOLE)
    assert page(PAGE.read_text()) == PAGE.read_text(), "run python -m tests.models.table"


def test_the_command_lists_them() -> None:
    command = [sys.executable, "-m", "holdover", "models"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert [line.split()[0] for line in shown.splitlines()] == list(MODELS)
    found = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert json.loads(found)["mamba2"] == "Mamba-2, convolution"


@pytest.mark.parametrize("kind", sorted(WHOLE))
def test_of_a_checkpoint_that_sees_pictures_the_language_model_is_served(kind: str, tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, WHOLE[kind])
    config = json.loads((tmp_path / "config.json").read_text())
    text = {key: value for key, value in config.items() if key != "architectures"}
    whole = {"model_type": kind, "text_config": text, "vision_config": {"depth": 1}, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    weights = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    more = {"model.visual.patch_embed.proj.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(2)}
    save_file({**weights, **more}, tmp_path / "model.safetensors")
    model = load_model(tmp_path, "float32")
    tokens = list(range(3, 80))
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(Feeder(model).feed({0: tokens})[0], expected, atol=1e-4, rtol=0)


def test_weights_that_nobody_takes_are_an_error(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3_5_text")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "model.layers.0.adapter.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"adapter\.weight"):
        load_model(tmp_path, "float32")


def test_an_unknown_type_is_told_which_are_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(ModelError, match="'rwkv' is not served; these are: bamba, deepseek_v3"):
        load_model(tmp_path)

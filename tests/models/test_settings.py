"""Nothing in a configuration is silently ignored: each number and switch changes what a model gives, is refused by
name, or changes nothing in Transformers' own model either."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from holdover.errors import ModelError
from holdover.models.registry import load_model
from tests.checkpoints import KINDS, VOCAB_SIZE, save_checkpoint
from tests.models.test_parity import Feeder

TOKENS = [random.Random(1).randrange(VOCAB_SIZE) for _ in range(60)]
# It says how weights are drawn before training; where it is set, Transformers 5.24 divides loaded ones once more.
DRAWING = "rescale_prenorm_residual"


def flipped(value: object) -> object:
    """Another value of the same kind; None for what is neither number nor switch."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value * 1.5 + 0.25 if isinstance(value, float) else None


def ours(folder: Path) -> torch.Tensor | None:
    """Scores of the test's tokens; None if the checkpoint is refused."""
    try:
        return Feeder(load_model(folder, "float32")).feed({0: TOKENS})[0]
    except ModelError:
        return None


def theirs(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, ignore_mismatched_sizes=False)
        return model.eval()(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_number_and_switch_counts_or_is_refused_or_is_of_no_use(kind: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, kind)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    expected, reference = ours(tmp_path), theirs(tmp_path)
    assert expected is not None
    ignored, counted = [], 0
    for name, value in config.items():
        other = flipped(value)
        if other is None:
            continue
        path.write_text(json.dumps({**config, name: other}))
        got = ours(tmp_path)
        if got is None or not torch.equal(got, expected):
            counted += 1
        elif name != DRAWING and not torch.allclose(theirs(tmp_path), reference, atol=1e-4, rtol=0):
            ignored.append(name)
    assert not ignored, f"these change Transformers' {kind} and not ours: {ignored}"
    assert counted > 5

"""In bfloat16 every model stays as near to float32 as Transformers' own, and a resumed run to an unbroken one.

With drawn weights the best two scores are often closer than bfloat16 can tell apart: Transformers' own models
then agree with themselves in float32 on 85 to 99.6 % of tokens. So ours are held to that, with room for chance:
where two experts are as good, rounding decides which one a token and all that follow it get.
"""

import random
from pathlib import Path

import pytest
import torch

from holdover.models.registry import load_model
from tests.checkpoints import KINDS, VOCAB_SIZE, make_reference
from tests.models.test_parity import Feeder, cut_at_random

PROMPTS, LENGTH = 4, 300


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.argmax(-1) == b.argmax(-1)).float().mean())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(kind: str, tmp_path: Path) -> None:
    reference = make_reference(kind, seed=1).to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    model, exact = load_model(tmp_path, "bfloat16"), load_model(tmp_path, "float32")
    theirs, ours, resumed, truth = [], [], [], []
    for seed in range(PROMPTS):
        rng = random.Random(seed)
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(LENGTH)]
        with torch.inference_mode():
            theirs.append(reference(torch.tensor([tokens])).logits[0].float())
        truth.append(Feeder(exact).feed({0: tokens})[0])
        feeder = Feeder(model)
        ours.append(feeder.feed({0: tokens})[0])
        resumed.append(torch.cat([feeder.feed({1: chunk})[1] for chunk in cut_at_random(tokens, rng)]))
    their, our, again, right = (torch.cat(each) for each in (theirs, ours, resumed, truth))
    assert (our - right).abs().mean() <= 1.35 * (their - right).abs().mean()
    assert agreement(our, right) >= agreement(their, right) - 0.03
    assert agreement(again, our) >= 0.98

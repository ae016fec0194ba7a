"""The models that can be served, by the `model_type` of their config.json."""

from pathlib import Path

import torch

from holdover.errors import ModelError
from holdover.models.base import Model
from holdover.models.kimi_linear import KimiLinear
from holdover.models.loader import Weights, read_config, serving_dtype
from holdover.models.qwen3 import Qwen3

MODELS = {"kimi_linear": KimiLinear, "qwen3": Qwen3}


def load_model(folder: Path, dtype: str = "auto", device: torch.device | None = None) -> Model:
    """Load the checkpoint in `folder`. Raises ModelError, which says what is wrong with it."""
    config = read_config(folder)
    model = MODELS.get(config["model_type"])
    if model is None:
        raise ModelError(
            f"model type {config['model_type']!r} is not served; these are: {', '.join(sorted(MODELS))}."
        )
    device = device or torch.device("cpu")
    return model(config, Weights(folder), serving_dtype(dtype, config), device)

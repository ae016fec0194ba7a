"""The models that can be served, by the `model_type` of their config.json."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdover.errors import ModelError
from holdover.models.base import Model
from holdover.models.kimi_linear import KimiLinear
from holdover.models.loader import Weights, read_config, serving_dtype
from holdover.models.qwen3 import Qwen3

ModelClass = Callable[[dict[str, Any], Weights, torch.dtype, torch.device], Model]
MODELS: dict[str, ModelClass] = {"kimi_linear": KimiLinear, "qwen3": Qwen3}


def load_model(folder: Path, dtype: str = "auto", device: torch.device | None = None) -> Model:
    """Load the checkpoint in `folder`. Raises ModelError, which says what is wrong with it."""
    config = read_config(folder)
    model = MODELS.get(config["model_type"])
    if model is None:
        raise ModelError(f"model type {config['model_type']!r} is not served; these are: {', '.join(sorted(MODELS))}.")
    device = device or torch.device("cpu")
    return model(config, Weights(folder), serving_dtype(dtype, config), device)

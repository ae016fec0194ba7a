"""The models that can be served, by the `model_type` of their config.json."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdover.errors import ModelError
from holdover.models.bamba import bamba, granite
from holdover.models.base import Model
from holdover.models.deepseek_v3 import deepseek_v3
from holdover.models.falcon_h1 import falcon_h1
from holdover.models.gpt_oss import gpt_oss
from holdover.models.jamba import jamba
from holdover.models.kimi_linear import kimi_linear
from holdover.models.lfm2 import lfm2
from holdover.models.llama import llama
from holdover.models.loader import Weights, read_config, serving_dtype
from holdover.models.mamba import falcon_mamba, mamba2
from holdover.models.nemotron_h import nemotron_h
from holdover.models.olmo import olmo3, olmo_hybrid
from holdover.models.oracle import FOLDER, PREFIX, make_oracle
from holdover.models.qwen3 import qwen3
from holdover.models.qwen3_next import qwen3_next

ModelClass = Callable[[dict[str, Any], Weights, torch.dtype, torch.device], Model]
MODELS: dict[str, ModelClass] = {
    "bamba": bamba,
    "deepseek_v3": deepseek_v3,
    "falcon_h1": falcon_h1,
    "falcon_mamba": falcon_mamba,
    "gpt_oss": gpt_oss,
    "granitemoehybrid": granite,
    "jamba": jamba,
    "kimi_linear": kimi_linear,
    "lfm2": lfm2,
    "lfm2_moe": lfm2,
    "llama": llama,
    "mamba2": mamba2,
    "mistral": llama,
    "nemotron_h": nemotron_h,
    "olmo3": olmo3,
    "olmo_hybrid": olmo_hybrid,
    "qwen3": qwen3,
    "qwen3_5": qwen3_next,
    "qwen3_5_moe": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
    "qwen3_5_text": qwen3_next,
    "qwen3_moe": qwen3,
    "qwen3_next": qwen3_next,
}


def model_folder(name: str) -> Path:
    """Where a model's tokenizer lies: the checkpoint's own folder, or the package's for `oracle:`."""
    return FOLDER if name.startswith(PREFIX) else Path(name)


def load_model(name: str | Path, dtype: str = "auto", device: torch.device | None = None) -> Model:
    """Load the checkpoint in the folder `name`, or make `oracle:KIND`. Raises ModelError, which says what is wrong."""
    device = device or torch.device("cpu")
    if str(name).startswith(PREFIX):
        if device.type != "cpu":
            raise ModelError("the oracle runs on the CPU only; leave --device at cpu.")
        return make_oracle(str(name))
    folder = Path(name)
    config = read_config(folder)
    model = MODELS.get(config["model_type"])
    if model is None:
        raise ModelError(f"model type {config['model_type']!r} is not served; these are: {', '.join(sorted(MODELS))}.")
    return model(config, Weights(folder), serving_dtype(dtype, config), device)

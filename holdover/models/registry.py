"""The models that can be served, by the `model_type` of their config.json."""

from collections.abc import Callable
from dataclasses import dataclass
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

Load = Callable[[dict[str, Any], Weights, torch.dtype, torch.device], Model]


@dataclass(frozen=True, slots=True)
class Served:
    """A type of models. state: what kinds of it a sequence has."""

    load: Load
    state: str


ATTENTION = "keys and values"
WINDOWS = "keys and values, in a window in some layers"
LATENTS = "MLA latents"
DELTA_NETS = "gated DeltaNet, convolution; keys and values"
MAMBAS = "Mamba-2, convolution; keys and values"
CONVOLUTIONS = "short convolution; keys and values"
MODELS: dict[str, Served] = {
    "bamba": Served(bamba, MAMBAS),
    "deepseek_v3": Served(deepseek_v3, LATENTS),
    "falcon_h1": Served(falcon_h1, MAMBAS),
    "falcon_mamba": Served(falcon_mamba, "Mamba-1, convolution"),
    "gpt_oss": Served(gpt_oss, WINDOWS),
    "granitemoehybrid": Served(granite, MAMBAS),
    "jamba": Served(jamba, "Mamba-1, convolution; keys and values"),
    "kimi_linear": Served(kimi_linear, "Kimi delta attention, convolutions; MLA latents"),
    "lfm2": Served(lfm2, CONVOLUTIONS),
    "lfm2_moe": Served(lfm2, CONVOLUTIONS),
    "llama": Served(llama, ATTENTION),
    "mamba2": Served(mamba2, "Mamba-2, convolution"),
    "mistral": Served(llama, "keys and values, in a window in some sizes"),
    "nemotron_h": Served(nemotron_h, MAMBAS),
    "olmo3": Served(olmo3, WINDOWS),
    "olmo_hybrid": Served(olmo_hybrid, DELTA_NETS),
    "qwen3": Served(qwen3, ATTENTION),
    "qwen3_5": Served(qwen3_next, DELTA_NETS),
    "qwen3_5_moe": Served(qwen3_next, DELTA_NETS),
    "qwen3_5_moe_text": Served(qwen3_next, DELTA_NETS),
    "qwen3_5_text": Served(qwen3_next, DELTA_NETS),
    "qwen3_moe": Served(qwen3, ATTENTION),
    "qwen3_next": Served(qwen3_next, DELTA_NETS),
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
    return model.load(config, Weights(folder), serving_dtype(dtype, config), device)

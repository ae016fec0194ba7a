"""Mamba-2, and Falcon Mamba, which is Mamba-1 with normed steps: no attention at all.

Sources: Dao and Gu, "Transformers are SSMs" (2024); Zuo et al., "Falcon Mamba" (2024).
"""

import math
from typing import Any

import torch

from holdover.models.decoder import Branch, Decoder, Names, Place, take_norm
from holdover.models.loader import Weights, positive, require
from holdover.models.state_space import Mamba1, Mamba1Shape, Mamba2, Mamba2Shape, step_limit

CONTEXT_LENGTH = 1 << 20  # a state has the same size at any length: nothing else limits it
NAMES = Names("backbone.embeddings.weight", "backbone.norm_f.weight")
MAMBA_NAMES = {
    "heads": "num_heads", "head_dim": "head_dim", "groups": "n_groups", "states": "state_size", "kernel": "conv_kernel",
}  # fmt: skip


def mamba2(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "mamba2". Raises ModelError."""
    config = _normalised({"num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128, **config})
    config["time_step_limit"] = step_limit(config.get("time_step_limit"))
    width = int(config["expand"] * config["hidden_size"])
    require(config, {"num_heads": lambda x: x * config["head_dim"] == width})
    shape = Mamba2Shape.of(
        config, MAMBA_NAMES, limit=tuple(config["time_step_limit"]), biased=bool(config["use_bias"]),
        conv_biased=bool(config["use_conv_bias"]),
    )  # fmt: skip

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch]:
        prefix, hidden, eps = f"backbone.layers.{index}", config["hidden_size"], config["rms_norm_eps"]
        norm = take_norm(weights, place, f"{prefix}.norm.weight", hidden)
        return (Branch(norm, Mamba2(index, f"{prefix}.mixer", hidden, shape, eps, weights, place)),)

    return _decoder(config, weights, dtype, device, make_layer)


def falcon_mamba(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "falcon_mamba". Raises ModelError."""
    config = _normalised({"state_size": 16, "mixer_rms_eps": 1e-6, "tie_word_embeddings": True, **config})
    if config.get("time_step_rank") in (None, "auto"):
        config["time_step_rank"] = math.ceil(config["hidden_size"] / 16)
    config.setdefault("intermediate_size", int(config["expand"] * config["hidden_size"]))
    positive(config, "time_step_rank", "state_size", "conv_kernel", "intermediate_size")
    shape = Mamba1Shape(
        width=config["intermediate_size"], states=config["state_size"], kernel=config["conv_kernel"],
        rank=config["time_step_rank"], biased=bool(config["use_bias"]), conv_biased=bool(config["use_conv_bias"]),
        norms=(), eps=config["mixer_rms_eps"],
    )  # fmt: skip

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch]:
        prefix, hidden = f"backbone.layers.{index}", config["hidden_size"]
        norm = take_norm(weights, place, f"{prefix}.norm.weight", hidden)
        return (Branch(norm, Mamba1(index, f"{prefix}.mixer", hidden, shape, weights, place)),)

    return _decoder(config, weights, dtype, device, make_layer)


def _normalised(config: dict[str, Any]) -> dict[str, Any]:
    for name, default in (
        ("conv_kernel", 4), ("expand", 2), ("use_bias", False), ("use_conv_bias", True), ("residual_in_fp32", True),
        ("tie_word_embeddings", False), ("layer_norm_epsilon", 1e-5),
    ):  # fmt: skip
        config.setdefault(name, default)
    config["rms_norm_eps"] = config["layer_norm_epsilon"]
    positive(config, "vocab_size", "hidden_size", "num_hidden_layers")
    require(config, {"hidden_act": lambda x: x == "silu", "quantization_config": lambda x: not x})
    return config


def _decoder(
    config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device, make_layer: Any
) -> Decoder:
    return Decoder(
        config, weights, dtype, device, make_layer, context_length=CONTEXT_LENGTH, names=NAMES,
        residual_dtype=torch.float32 if config["residual_in_fp32"] else None,
    )  # fmt: skip

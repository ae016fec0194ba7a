"""Jamba: Mamba-1, attention without positions in some layers, and experts in some.

Source: AI21, "Jamba: A Hybrid Transformer-Mamba Language Model" (2024).
"""

import math
from typing import Any

import torch

from holdover.models.attention import Attention, normalise_attention
from holdover.models.decoder import Branch, Decoder, Names, Part, Place, feed_forward, pre_normed
from holdover.models.experts import SoftmaxExperts, stacked_experts
from holdover.models.loader import Weights, positive, require
from holdover.models.state_space import Mamba1, Mamba1Shape

NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


def jamba(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "jamba". Raises ModelError."""
    config = _normalised(config)

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        prefix, hidden, inner = f"model.layers.{index}", config["hidden_size"], config["intermediate_size"]
        if config["layer_types"][index] == "full_attention":
            mixer: Part = Attention(config, index, weights, place, rope=None)
        else:
            mixer = Mamba1(index, f"{prefix}.mamba", hidden, _shape(config), weights, place)
        prefix = f"{prefix}.feed_forward"
        count = config["layers_num_experts"][index]
        if count > 1:
            after: Part = SoftmaxExperts(
                place(weights.take(f"{prefix}.router.weight", (count, hidden))),
                stacked_experts(weights, place, f"{prefix}.experts", count, hidden, inner),
                top_k=config["num_experts_per_tok"],
                renormalize=False,
            )
        else:
            after = feed_forward(weights, place, (prefix,), hidden, inner)
        names = ("input_layernorm", "pre_ff_layernorm")
        return pre_normed(config, index, weights, place, mixer, after, names=names)

    return Decoder(
        config, weights, dtype, device, make_layer, context_length=config["max_position_embeddings"],
        names=Names(norm="model.final_layernorm.weight"),
    )  # fmt: skip


def _normalised(config: dict[str, Any]) -> dict[str, Any]:
    for name, default in (
        ("max_position_embeddings", 262_144), ("attn_layer_period", 8), ("attn_layer_offset", 4),
        ("expert_layer_period", 2), ("expert_layer_offset", 1), ("num_experts", 16), ("num_experts_per_tok", 2),
        ("mamba_d_state", 16), ("mamba_d_conv", 4), ("mamba_expand", 2), ("mamba_conv_bias", True),
        ("mamba_proj_bias", False),
    ):  # fmt: skip
        config = {name: default, **config}
    config = normalise_attention(config)
    if config.get("mamba_dt_rank") in (None, "auto"):
        config["mamba_dt_rank"] = math.ceil(config["hidden_size"] / 16)
    positive(
        config, "attn_layer_period", "expert_layer_period", "num_experts", "num_experts_per_tok", "mamba_d_state",
        "mamba_d_conv", "mamba_expand", "mamba_dt_rank",
    )  # fmt: skip

    def falls(index: int, kind: str) -> bool:
        return bool(index % config[f"{kind}_layer_period"] == config[f"{kind}_layer_offset"])

    layers = range(config["num_hidden_layers"])
    config["layer_types"] = ["full_attention" if falls(i, "attn") else "linear_attention" for i in layers]
    config["layers_num_experts"] = [config["num_experts"] if falls(i, "expert") else 1 for i in layers]
    require(
        config,
        {
            "sliding_window": lambda x: x is None,
            "attention_bias": lambda x: not x,
            "num_experts_per_tok": lambda x: x <= config["num_experts"] or config["num_experts"] == 1,
        },
    )
    return config


def _shape(config: dict[str, Any]) -> Mamba1Shape:
    return Mamba1Shape(
        width=config["mamba_expand"] * config["hidden_size"],
        states=config["mamba_d_state"],
        kernel=config["mamba_d_conv"],
        rank=config["mamba_dt_rank"],
        biased=bool(config["mamba_proj_bias"]),
        conv_biased=bool(config["mamba_conv_bias"]),
        norms=NORMS,
        eps=config["rms_norm_eps"],
    )

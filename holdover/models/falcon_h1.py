"""Falcon-H1: Mamba-2 and attention side by side in every layer, with constant factors everywhere.

Source: Zuo et al., "Falcon-H1" (2025).
"""

from typing import Any

import torch

from holdover.models.attention import Attention, normalise_attention
from holdover.models.bamba import MAMBA_NAMES, normalise_mamba
from holdover.models.base import Batch
from holdover.models.decoder import Arrays, Branch, Decoder, Names, Place, Turns, feed_forward, pre_normed
from holdover.models.loader import Weights, require
from holdover.models.rotary import Rotary
from holdover.models.state_space import Mamba2, Mamba2Shape
from holdover.state.pool import DevicePool


class SideBySide:
    """What Mamba-2 and attention make of the same input, added."""

    def __init__(self, mamba: Mamba2, attention: Attention) -> None:
        self.mamba, self.attention = mamba, attention

    def arrays(self, dtype: torch.dtype) -> Arrays:
        return Arrays(token=self.attention.arrays(dtype).token, snapshot=self.mamba.arrays(dtype).snapshot)

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turns: Turns) -> torch.Tensor:
        return self.mamba.forward(x, batch, pool, turns) + self.attention.forward(x, batch, pool, turns)


def falcon_h1(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "falcon_h1". Raises ModelError."""
    config = _normalised(config)

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        hidden = config["hidden_size"]
        scales = tuple(config[f"{name}_multiplier"] for name in ("attention_in", "key", "attention_out"))
        attention = Attention(config, index, weights, place, scales=scales)
        shape, eps = _shape(config), config["rms_norm_eps"]
        mamba = Mamba2(index, f"model.layers.{index}.mamba", hidden, shape, eps, weights, place)
        gate_scale, scale = config["mlp_multipliers"]
        dense = feed_forward(
            weights, place, (f"model.layers.{index}.feed_forward",), hidden, config["intermediate_size"],
            gate_scale=gate_scale, scale=scale,
        )  # fmt: skip
        names = ("input_layernorm", "pre_ff_layernorm")
        return pre_normed(config, index, weights, place, SideBySide(mamba, attention), dense, names=names)

    context_length = config["max_position_embeddings"]
    rotary = Rotary.of(config["rope_parameters"], config, context_length, config["head_dim"])
    return Decoder(
        config, weights, dtype, device, make_layer, context_length=context_length, rotaries={"default": rotary},
        names=Names(norm="model.final_layernorm.weight"), embedding_scale=config["embedding_multiplier"],
        logits_scale=config["lm_head_multiplier"],
    )  # fmt: skip


def _normalised(config: dict[str, Any]) -> dict[str, Any]:
    config = normalise_mamba(normalise_attention(config, eps=1e-5))
    for name in ("embedding", "lm_head", "attention_in", "attention_out", "key", "ssm_in", "ssm_out"):
        if config.get(f"{name}_multiplier") is None:
            config[f"{name}_multiplier"] = 1.0
    for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        if config.get(name) is None:
            config[name] = [1.0] * count
        require(config, {name: lambda x, count=count: len(x) == count})  # type: ignore[misc]
    for name, default in (("mamba_rms_norm", True), ("mamba_norm_before_gate", True), ("projectors_bias", False)):
        config.setdefault(name, default)
    return config


def _shape(config: dict[str, Any]) -> Mamba2Shape:
    gated_norm = None
    if config["mamba_rms_norm"]:
        gated_norm = "norm first" if config["mamba_norm_before_gate"] else "gate first"
    heads, grouped = config["mamba_n_heads"], config["mamba_n_groups"] * config["mamba_d_state"]
    width = heads * config["mamba_d_head"]
    sizes = torch.tensor([width, width, grouped, grouped, heads])
    factors = torch.tensor(config["ssm_multipliers"], dtype=torch.float32).repeat_interleave(sizes)
    return Mamba2Shape.of(
        config, MAMBA_NAMES, limit=tuple(config["time_step_limit"]), biased=bool(config["mamba_proj_bias"]),
        conv_biased=bool(config["mamba_conv_bias"]), gated_norm=gated_norm, out_biased=bool(config["projectors_bias"]),
        in_scale=factors, before_scale=config["ssm_in_multiplier"], out_scale=config["ssm_out_multiplier"],
    )  # fmt: skip

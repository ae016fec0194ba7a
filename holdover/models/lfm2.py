"""LFM2, dense and with a mixture of experts: gated short convolutions, and attention in some layers.

Source: Liquid AI, "LFM2 Technical Report" (2025).
"""

from typing import Any

import torch

from holdover.models.attention import Attention, AttentionNames, normalise_attention
from holdover.models.base import Batch
from holdover.models.decoder import Arrays, Branch, Decoder, Names, Part, Place, Turns, feed_forward, pre_normed
from holdover.models.experts import MIXTRAL, stacked_experts
from holdover.models.loader import Weights, positive, require
from holdover.models.rotary import Rotary
from holdover.models.state_space import take_biased, take_conv
from holdover.ops.conv import causal_conv
from holdover.ops.experts import route_sigmoid
from holdover.state.layout import ArraySpec
from holdover.state.pool import DevicePool

WEIGHT_NAMES = AttentionNames(output="out_proj", query_norm="q_layernorm", key_norm="k_layernorm")
RENORMALIZING_EPS = 1e-6


def lfm2(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "lfm2" or "lfm2_moe". Raises ModelError."""
    config = _normalised(config)

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        if config["layer_types"][index] == "full_attention":
            mixer: Part = Attention(config, index, weights, place, names=WEIGHT_NAMES, query_key_norm="head")
        else:
            mixer = ShortConvolution(config, index, weights, place)
        prefix = f"model.layers.{index}.feed_forward"
        if config["model_type"] == "lfm2_moe" and index >= config["num_dense_layers"]:
            after: Part = Experts(config, prefix, weights, place)
        else:
            hidden, inner = config["hidden_size"], _inner_size(config)
            after = feed_forward(weights, place, (prefix,), hidden, inner, names=MIXTRAL)
        return pre_normed(config, index, weights, place, mixer, after, names=("operator_norm", "ffn_norm"))

    context_length = config["max_position_embeddings"]
    rotary = Rotary.of(config["rope_parameters"], config, context_length, config["head_dim"])
    return Decoder(
        config, weights, dtype, device, make_layer, context_length=context_length, rotaries={"default": rotary},
        names=Names(norm="model.embedding_norm.weight"),
    )  # fmt: skip


def _normalised(config: dict[str, Any]) -> dict[str, Any]:
    config = dict(config)
    if "tie_embedding" in config:  # as checkpoints have called it
        config.setdefault("tie_word_embeddings", config["tie_embedding"])
    for name, default in (("norm_eps", 1e-5), ("tie_word_embeddings", True), ("conv_bias", False), ("conv_L_cache", 3)):
        config.setdefault(name, default)
    config["rms_norm_eps"] = config["norm_eps"]
    if config.get("block_ff_dim") is not None:
        config["intermediate_size"] = config["block_ff_dim"]
    config = normalise_attention(config)
    layers = config["num_hidden_layers"]
    if not config.get("layer_types"):
        full = config.get("full_attn_idxs")
        full = range(layers) if full is None else full
        config["layer_types"] = ["full_attention" if i in full else "conv" for i in range(layers)]
    positive(config, "conv_L_cache")
    if config["model_type"] == "lfm2_moe":
        for name, default in (
            ("num_dense_layers", 2), ("num_experts", 32), ("num_experts_per_tok", 4), ("use_expert_bias", True),
            ("norm_topk_prob", True), ("routed_scaling_factor", 1.0),
        ):  # fmt: skip
            config.setdefault(name, default)
        positive(config, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
        require(config, {"num_experts_per_tok": lambda x: x <= config["num_experts"]})
    else:
        config.setdefault("block_auto_adjust_ff_dim", True)
        config.setdefault("block_multiple_of", 256)
        config.setdefault("block_ffn_dim_multiplier", 1.0)
        positive(config, "block_multiple_of")
    require(
        config,
        {
            "layer_types": lambda x: len(x) == layers and set(x) <= {"full_attention", "conv"},
            "conv_L_cache": lambda x: x >= 2,
            "attention_bias": lambda x: not x,
        },
    )
    return config


def _inner_size(config: dict[str, Any]) -> int:
    inner: int = config["intermediate_size"]
    if config["model_type"] == "lfm2" and config["block_auto_adjust_ff_dim"]:
        inner = int(2 * inner / 3)
        if config["block_ffn_dim_multiplier"] is not None:
            inner = int(config["block_ffn_dim_multiplier"] * inner)
            inner = -(-inner // config["block_multiple_of"]) * config["block_multiple_of"]
    return inner


class Experts:
    """Experts chosen by sigmoid scores, with a correction bias in most checkpoints."""

    def __init__(self, config: dict[str, Any], prefix: str, weights: Weights, place: Place) -> None:
        hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
        self.router = place(weights.take(f"{prefix}.gate.weight", (count, hidden)), torch.float32)
        self.bias = place(torch.zeros(count), torch.float32)
        if config["use_expert_bias"]:
            self.bias = place(weights.take(f"{prefix}.expert_bias", (count,)), torch.float32)
        self.experts = stacked_experts(weights, place, f"{prefix}.experts", count, hidden, inner, MIXTRAL)
        self.top_k: int = config["num_experts_per_tok"]
        self.renormalize = bool(config["norm_topk_prob"])
        self.scaling: float = config["routed_scaling_factor"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        routed, experts = route_sigmoid(
            x, self.router, self.bias, top_k=self.top_k, num_groups=1, top_groups=1, renormalize=False, scaling=1.0
        )
        if self.renormalize:
            routed = routed / (routed.sum(-1, keepdim=True) + RENORMALIZING_EPS)
        return self.experts(x, routed * self.scaling, experts, torch.zeros_like(x))


class ShortConvolution:
    """A gated input goes through a convolution over a few tokens, and through another gate. Snapshot state: the
    convolution's last inputs."""

    def __init__(self, config: dict[str, Any], index: int, weights: Weights, place: Place) -> None:
        prefix, hidden, biased = f"model.layers.{index}.conv", config["hidden_size"], bool(config["conv_bias"])
        self.conv_name = f"layers.{index}.conv"
        self.inputs = take_biased(weights, place, f"{prefix}.in_proj", (3 * hidden, hidden), biased)
        self.output = take_biased(weights, place, f"{prefix}.out_proj", (hidden, hidden), biased)
        self.conv, self.conv_bias = take_conv(weights, place, f"{prefix}.conv", hidden, config["conv_L_cache"], biased)

    def arrays(self, dtype: torch.dtype) -> Arrays:
        kernel, channels = self.conv.shape
        return Arrays(snapshot=[ArraySpec(self.conv_name, (kernel - 1, channels), dtype)])

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turns: Turns) -> torch.Tensor:
        gate_in, gate_out, values = self.inputs(x).chunk(3, dim=1)
        sequences, tail = batch.live_sequences(pool), pool.live_views[self.conv_name]
        mixed = causal_conv(gate_in * values, self.conv, self.conv_bias, tail, sequences, silu=False)
        return self.output(gate_out * mixed.to(x.dtype))

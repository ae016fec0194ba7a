"""Qwen3, dense and with a mixture of experts: grouped-query attention with normed queries and keys.

Source: Qwen Team, "Qwen3" (2025).
"""

from typing import Any

import torch

from holdover.models.attention import Attention, normalise_attention
from holdover.models.decoder import Decoder, Layer, Place, feed_forward, layer_norms
from holdover.models.loader import Weights, positive, require
from holdover.ops.experts import ExpertFeedForward, route_softmax

HEAD_DIM = 128  # where config.json does not say


def qwen3(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "qwen3" or "qwen3_moe". Raises ModelError."""
    config = _normalised(config)

    def make_layer(index: int, weights: Weights, place: Place) -> Layer:
        input_norm, post_norm = layer_norms(config, index, weights, place)
        attention = Attention(config, index, weights, place, query_key_norm=True)
        prefix = f"model.layers.{index}.mlp"
        if _is_sparse(config, index):
            return Layer(input_norm, attention, post_norm, Experts(config, prefix, weights, place))
        inner = config["intermediate_size"]
        dense = feed_forward(weights, place, (prefix,), config["hidden_size"], inner)
        return Layer(input_norm, attention, post_norm, dense)

    context_length = config["max_position_embeddings"]
    return Decoder(config, weights, dtype, device, make_layer, context_length=context_length, rotary=True)


def _normalised(config: dict[str, Any]) -> dict[str, Any]:
    config = normalise_attention(config, head_dim=HEAD_DIM)
    if config["model_type"] == "qwen3_moe":
        config.setdefault("num_experts", config.get("num_local_experts", 128))
        config.setdefault("num_experts_per_tok", 8)
        config.setdefault("norm_topk_prob", False)
        config.setdefault("decoder_sparse_step", 1)
        positive(config, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
    require(
        config,
        {
            "use_sliding_window": lambda x: not x,
            "layer_types": lambda x: x is None or set(x) <= {"full_attention"},
            "num_experts_per_tok": lambda x: x <= config.get("num_experts", x),
        },
    )
    return config


def _is_sparse(config: dict[str, Any], index: int) -> bool:
    if config["model_type"] != "qwen3_moe" or index in (config.get("mlp_only_layers") or ()):
        return False
    return (index + 1) % int(config["decoder_sparse_step"]) == 0


class Experts:
    """Routed experts, and none that all tokens share."""

    def __init__(self, config: dict[str, Any], prefix: str, weights: Weights, place: Place) -> None:
        hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
        self.router = place(weights.take(f"{prefix}.gate.weight", (count, hidden)))
        gate_up, down = [], []
        for each in range(count):
            parts = [
                weights.take(f"{prefix}.experts.{each}.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up")
            ]
            gate_up.append(torch.cat(parts))
            down.append(weights.take(f"{prefix}.experts.{each}.down_proj.weight", (hidden, inner)))
        self.experts = ExpertFeedForward(place(torch.stack(gate_up)), place(torch.stack(down)))
        self.top_k: int = config["num_experts_per_tok"]
        self.renormalize = bool(config["norm_topk_prob"])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        routed, experts = route_softmax(x, self.router, top_k=self.top_k, renormalize=self.renormalize)
        return self.experts(x, routed, experts, torch.zeros_like(x))

"""Qwen3, dense and with a mixture of experts: grouped-query attention with normed queries and keys.

Source: Qwen Team, "Qwen3" (2025).
"""

from typing import Any

import torch

from holdover.models.attention import Attention, normalise_attention
from holdover.models.decoder import Branch, Decoder, Place, feed_forward, pre_normed
from holdover.models.experts import SoftmaxExperts, stacked_experts
from holdover.models.loader import Weights, positive, require
from holdover.models.rotary import Rotary

HEAD_DIM = 128  # where config.json does not say


def qwen3(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "qwen3" or "qwen3_moe". Raises ModelError."""
    config = _normalised(config)

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        attention = Attention(config, index, weights, place, query_key_norm="head")
        prefix = f"model.layers.{index}.mlp"
        if _is_sparse(config, index):
            return pre_normed(config, index, weights, place, attention, _experts(config, prefix, weights, place))
        dense = feed_forward(weights, place, (prefix,), config["hidden_size"], config["intermediate_size"])
        return pre_normed(config, index, weights, place, attention, dense)

    context_length = config["max_position_embeddings"]
    rotary = Rotary.of(config["rope_parameters"], config, context_length, config["head_dim"])
    return Decoder(
        config, weights, dtype, device, make_layer, context_length=context_length, rotaries={"default": rotary}
    )


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


def _experts(config: dict[str, Any], prefix: str, weights: Weights, place: Place) -> SoftmaxExperts:
    """Routed experts, and none that all tokens share."""
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    router = place(weights.take(f"{prefix}.gate.weight", (count, hidden)))
    experts = stacked_experts(weights, place, f"{prefix}.experts", count, hidden, inner)
    top_k, renormalize = config["num_experts_per_tok"], bool(config["norm_topk_prob"])
    return SoftmaxExperts(router, experts, top_k=top_k, renormalize=renormalize)

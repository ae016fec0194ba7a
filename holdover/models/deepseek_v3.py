"""DeepSeek-V3: multi-head latent attention with rotary positions, and a mixture of experts.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024).
"""

import math
from typing import Any

import torch

from holdover.models.decoder import Branch, Decoder, Place, feed_forward, pre_normed
from holdover.models.experts import SigmoidExperts, stacked_experts
from holdover.models.latent import LatentAttention
from holdover.models.loader import Weights, positive, require
from holdover.models.rotary import Rotary, normalise_rope


def deepseek_v3(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "deepseek_v3", in bfloat16 (not float8). Raises ModelError."""
    config = _normalised(config)
    layers = config["num_hidden_layers"]
    weights.leave(rf"^model\.layers\.{layers}\.")  # of the head that predicts one token further
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * _yarn_scale(config["rope_parameters"])

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        interleaved = bool(config["rope_interleave"])
        attention = LatentAttention(config, index, weights, place, rope="default", interleaved=interleaved, scale=scale)
        prefix = f"model.layers.{index}.mlp"
        if index >= config["first_k_dense_replace"]:
            return pre_normed(config, index, weights, place, attention, _experts(config, prefix, weights, place))
        dense = feed_forward(weights, place, (prefix,), config["hidden_size"], config["intermediate_size"])
        return pre_normed(config, index, weights, place, attention, dense)

    context_length = config["max_position_embeddings"]
    rotary = Rotary.of(config["rope_parameters"], config, context_length, config["qk_rope_head_dim"])
    return Decoder(
        config, weights, dtype, device, make_layer, context_length=context_length, rotaries={"default": rotary}
    )


def _normalised(config: dict[str, Any]) -> dict[str, Any]:
    config = dict(config)
    for name, default in (
        ("rms_norm_eps", 1e-6), ("n_group", 8), ("topk_group", 4), ("norm_topk_prob", True), ("n_shared_experts", 1),
        ("routed_scaling_factor", 2.5), ("first_k_dense_replace", 3), ("num_experts_per_tok", 8),
        ("rope_interleave", True), ("tie_word_embeddings", False),
    ):  # fmt: skip
        config.setdefault(name, default)
    normalise_rope(config)
    positive(
        config, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
        "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group",
    )  # fmt: skip
    if config.get("q_lora_rank") is not None:
        positive(config, "q_lora_rank")
    require(
        config,
        {
            "hidden_act": lambda x: x == "silu",
            "quantization_config": lambda x: not x,
            "pretraining_tp": lambda x: x == 1,
            "qk_rope_head_dim": lambda x: x % 2 == 0,
            "head_dim": lambda x: x in (None, config["qk_rope_head_dim"]),
            "qk_head_dim": lambda x: x in (None, config["qk_nope_head_dim"] + config["qk_rope_head_dim"]),
            "num_key_value_heads": lambda x: x in (None, config["num_attention_heads"]),
            "scoring_func": lambda x: x == "sigmoid",
            "topk_method": lambda x: x == "noaux_tc",
            "moe_layer_freq": lambda x: x == 1,
            "n_group": lambda x: config["n_routed_experts"] % x == 0,
            "topk_group": lambda x: x <= config["n_group"],
            "num_experts_per_tok": lambda x: x <= config["n_routed_experts"],
        },
    )
    return config


def _yarn_scale(rope: dict[str, Any]) -> float:
    """What yarn multiplies scores by, besides what it does to positions."""
    factor, mscale = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    if rope["rope_type"] == "default" or not mscale or factor <= 1:
        return 1.0
    return float((0.1 * mscale * math.log(factor) + 1.0) ** 2)


def _experts(config: dict[str, Any], prefix: str, weights: Weights, place: Place) -> SigmoidExperts:
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    router = place(weights.take(f"{prefix}.gate.weight", (count, hidden)), torch.float32)
    bias = place(weights.take(f"{prefix}.gate.e_score_correction_bias", (count,)), torch.float32)
    experts = stacked_experts(weights, place, f"{prefix}.experts", count, hidden, inner)
    shared = feed_forward(weights, place, (f"{prefix}.shared_experts",), hidden, inner * config["n_shared_experts"])
    return SigmoidExperts(config, router, bias, experts, shared)

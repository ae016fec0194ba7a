"""gpt-oss: attention with sinks, over all tokens and over windows in turn, and experts with clamped gates.

Source: OpenAI, "gpt-oss-120b and gpt-oss-20b Model Card" (2025).
"""

from typing import Any

import torch

from holdover.models.attention import Attention, normalise_attention
from holdover.models.decoder import Branch, Decoder, Place, pre_normed
from holdover.models.experts import SoftmaxExperts
from holdover.models.loader import Weights, positive, require
from holdover.models.rotary import Rotary
from holdover.ops.experts import ExpertFeedForward

HEAD_DIM = 64  # where config.json does not say


def gpt_oss(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "gpt_oss", in bfloat16 (not MXFP4). Raises ModelError."""
    config = _normalised(config)
    context_length = config["max_position_embeddings"]

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        window = config["sliding_window"] if config["layer_types"][index] == "sliding_attention" else None
        if window is not None and window >= context_length:  # all is seen anyway
            window = None
        attention = Attention(config, index, weights, place, window=window, sinks=True)
        experts = _experts(config, f"model.layers.{index}.mlp", weights, place)
        return pre_normed(config, index, weights, place, attention, experts)

    rotary = Rotary.of(config["rope_parameters"], config, context_length, config["head_dim"])
    return Decoder(
        config, weights, dtype, device, make_layer, context_length=context_length, rotaries={"default": rotary}
    )


def _normalised(config: dict[str, Any]) -> dict[str, Any]:
    config = {"attention_bias": True, "num_key_value_heads": 8, "sliding_window": 128, **config}
    config = normalise_attention(config, head_dim=HEAD_DIM, eps=1e-5)
    layers = config["num_hidden_layers"]
    if not config.get("layer_types"):
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[(i + 1) % 2] for i in range(layers)]
    config.setdefault("num_experts_per_tok", config.get("experts_per_token", 4))
    config.setdefault("num_local_experts", 128)
    config.setdefault("swiglu_alpha", 1.702)
    config.setdefault("swiglu_limit", 7.0)
    positive(config, "num_local_experts", "num_experts_per_tok", "sliding_window")
    require(
        config,
        {
            "layer_types": lambda x: len(x) == layers and set(x) <= {"full_attention", "sliding_attention"},
            "sliding_window": lambda x: x > 1,
            "num_experts_per_tok": lambda x: x <= config["num_local_experts"],
        },
    )
    return config


def _experts(config: dict[str, Any], prefix: str, weights: Weights, place: Place) -> SoftmaxExperts:
    hidden, inner, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    alpha, limit = config["swiglu_alpha"], config["swiglu_limit"]

    def gated(rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    # Gates and what they gate lie in turns, and weights [in_features, out_features].
    up = weights.take(f"{prefix}.experts.gate_up_proj", (count, hidden, 2 * inner)).transpose(1, 2)
    up_bias = weights.take(f"{prefix}.experts.gate_up_proj_bias", (count, 2 * inner))
    down = weights.take(f"{prefix}.experts.down_proj", (count, inner, hidden)).transpose(1, 2)
    biases = (
        place(torch.cat([up_bias[:, 0::2], up_bias[:, 1::2]], dim=1)),
        place(weights.take(f"{prefix}.experts.down_proj_bias", (count, hidden))),
    )
    gate_up = place(torch.cat([up[:, 0::2], up[:, 1::2]], dim=1))
    return SoftmaxExperts(
        place(weights.take(f"{prefix}.router.weight", (count, hidden))),
        ExpertFeedForward(gate_up, place(down), gated, biases),
        top_k=config["num_experts_per_tok"],
        renormalize=True,
        bias=place(weights.take(f"{prefix}.router.bias", (count,))),
    )

"""Nemotron-H: each layer is one of Mamba-2, attention without positions, a plain feed-forward part, or experts.

Source: NVIDIA, "Nemotron-H" (2025).
"""

from typing import Any

import torch
import torch.nn.functional as F

from holdover.models.attention import Attention, normalise_heads
from holdover.models.decoder import Branch, Decoder, Names, Part, Place, take_norm
from holdover.models.experts import SigmoidExperts
from holdover.models.loader import Weights, positive, require
from holdover.models.state_space import Mamba2, Mamba2Shape
from holdover.ops.experts import ExpertFeedForward
from holdover.ops.linear import Linear

MAMBA_NAMES = {
    "heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "groups": "n_groups", "states": "ssm_state_size",
    "kernel": "conv_kernel",
}  # fmt: skip
PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


class Plain:
    """down(relu(up(x))^2)."""

    def __init__(self, prefix: str, hidden: int, inner: int, weights: Weights, place: Place) -> None:
        self.up = Linear(place(weights.take(f"{prefix}.up_proj.weight", (inner, hidden))))
        self.down = Linear(place(weights.take(f"{prefix}.down_proj.weight", (hidden, inner))))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(squared_relu(self.up(x)))


def nemotron_h(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "nemotron_h". Raises ModelError."""
    config = _normalised(config)
    weights.leave(r"^mtp\.")

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch]:
        prefix, hidden = f"backbone.layers.{index}", config["hidden_size"]
        norm = take_norm(weights, place, f"{prefix}.norm.weight", hidden)
        match config["layers_block_type"][index]:
            case "linear_attention":
                shape = Mamba2Shape.of(
                    config, MAMBA_NAMES, limit=(config["time_step_min"], float("inf")), biased=bool(config["use_bias"]),
                    conv_biased=bool(config["use_conv_bias"]),
                )  # fmt: skip
                eps = config["rms_norm_eps"]
                part: Part = Mamba2(index, f"{prefix}.mixer", hidden, shape, eps, weights, place)
            case "full_attention":
                part = Attention(config, index, weights, place, prefix="backbone.layers.{}.mixer", rope=None)
            case "mlp":
                part = Plain(f"{prefix}.mixer", hidden, config["intermediate_size"], weights, place)
            case _:
                part = _experts(config, f"{prefix}.mixer", weights, place)
        return (Branch(norm, part),)

    return Decoder(
        config, weights, dtype, device, make_layer, context_length=config["max_position_embeddings"],
        names=Names("backbone.embeddings.weight", "backbone.norm_f.weight"),
        residual_dtype=torch.float32 if config["residual_in_fp32"] else None,
    )  # fmt: skip


def _normalised(config: dict[str, Any]) -> dict[str, Any]:
    config = dict(config)
    if not config.get("layers_block_type"):
        pattern = config.get("hybrid_override_pattern") or ""
        config["layers_block_type"] = [PATTERN.get(each, each) for each in pattern]
    config["layers_block_type"] = [LAYER_TYPES.get(each, each) for each in config["layers_block_type"]]
    config["num_hidden_layers"] = len(config["layers_block_type"])
    config["rms_norm_eps"] = config.get("layer_norm_epsilon", config.get("norm_eps", 1e-5))
    for name, default in (
        ("residual_in_fp32", False), ("use_bias", False), ("use_conv_bias", True), ("time_step_min", 0.001),
        ("tie_word_embeddings", False), ("max_position_embeddings", 4096), ("n_group", 1), ("topk_group", 1),
        ("norm_topk_prob", True), ("routed_scaling_factor", 1.0), ("n_shared_experts", 1), ("moe_latent_size", None),
    ):  # fmt: skip
        config.setdefault(name, default)
    positive(config, "vocab_size", "num_hidden_layers", "max_position_embeddings", "intermediate_size")
    normalise_heads(config)
    kinds = config["layers_block_type"]
    if "moe" in kinds:
        positive(
            config, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
            "moe_shared_expert_intermediate_size",
        )  # fmt: skip
        require(
            config,
            {
                "num_experts_per_tok": lambda x: x <= config["n_routed_experts"],
                "n_group": lambda x: config["n_routed_experts"] % x == 0,
                "topk_group": lambda x: x <= config["n_group"],
            },
        )
    require(
        config,
        {
            "layers_block_type": lambda x: set(x) <= set(PATTERN.values()),
            "mlp_hidden_act": lambda x: x == "relu2",
            "mamba_hidden_act": lambda x: x == "silu",
            "mlp_bias": lambda x: not x,
            "attention_bias": lambda x: not x,
            "mamba_proj_bias": lambda x: bool(x) == bool(config["use_bias"]),
            "sliding_window": lambda x: x is None,
            "quantization_config": lambda x: not x,
            "n_shared_experts": lambda x: x == 1,
        },
    )
    return config


def _experts(config: dict[str, Any], prefix: str, weights: Weights, place: Place) -> SigmoidExperts:
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    width = config["moe_latent_size"] or hidden
    up, down = (
        torch.stack([weights.take(f"{prefix}.experts.{i}.{name}_proj.weight", shape) for i in range(count)])
        for name, shape in (("up", (inner, width)), ("down", (width, inner)))
    )
    latent = None
    if config["moe_latent_size"] is not None:
        latent = (
            Linear(place(weights.take(f"{prefix}.fc1_latent_proj.weight", (width, hidden)))),
            Linear(place(weights.take(f"{prefix}.fc2_latent_proj.weight", (hidden, width)))),
        )
    return SigmoidExperts(
        config,
        place(weights.take(f"{prefix}.gate.weight", (count, hidden)), torch.float32),
        place(weights.take(f"{prefix}.gate.e_score_correction_bias", (count,)), torch.float32),
        ExpertFeedForward(place(up), place(down), squared_relu),
        Plain(f"{prefix}.shared_experts", hidden, config["moe_shared_expert_intermediate_size"], weights, place),
        latent,
    )

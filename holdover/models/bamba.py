"""Bamba, and Granite 4, which is built like it: Mamba-2, and attention in some layers.

Sources: IBM et al., "Bamba" (2024); IBM, "Granite 4.0" (2025).
"""

from typing import Any

import torch

from holdover.models.attention import Attention, normalise_attention
from holdover.models.decoder import Branch, Decoder, Names, Part, Place, feed_forward, pre_normed
from holdover.models.experts import SoftmaxExperts
from holdover.models.loader import Weights, positive, require
from holdover.models.rotary import Rotary
from holdover.models.state_space import Mamba2, Mamba2Shape, step_limit
from holdover.ops.experts import ExpertFeedForward, FeedForward

PARTIAL = 0.5  # of a head is turned in Bamba
MAMBA_NAMES = {
    "heads": "mamba_n_heads", "head_dim": "mamba_d_head", "groups": "mamba_n_groups", "states": "mamba_d_state",
    "kernel": "mamba_d_conv",
}  # fmt: skip
LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}  # as older checkpoints call them


def bamba(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "bamba". Raises ModelError."""
    config = normalise_mamba(normalise_attention(config, eps=1e-5, partial=PARTIAL))
    if not config.get("layer_types"):
        full = config.get("attn_layer_indices") or ()
        config["layer_types"] = [
            "full_attention" if i in full else "linear_attention" for i in range(config["num_hidden_layers"])
        ]
    _check_layers(config)

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        mixer = _mixer(config, index, weights, place, rope="default")
        prefix, inner = (f"model.layers.{index}.feed_forward",), config["intermediate_size"]
        dense = feed_forward(weights, place, prefix, config["hidden_size"], inner)
        names = ("input_layernorm", "pre_ff_layernorm")
        return pre_normed(config, index, weights, place, mixer, dense, names=names)

    context_length = config["max_position_embeddings"]
    rotary = Rotary.of(config["rope_parameters"], config, context_length, config["head_dim"])
    return Decoder(
        config, weights, dtype, device, make_layer, context_length=context_length, rotaries={"default": rotary},
        names=Names(norm="model.final_layernorm.weight"),
    )  # fmt: skip


def granite(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "granitemoehybrid". Raises ModelError."""
    config = _normalised_granite(config)
    rope = "default" if config["position_embedding_type"] == "rope" else None

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        mixer = _mixer(config, index, weights, place, rope=rope, scale=config["attention_multiplier"])
        prefix = f"model.layers.{index}"
        hidden, inner = config["hidden_size"], config["shared_intermediate_size"]
        shared: Part = FeedForward(
            place(weights.take(f"{prefix}.shared_mlp.input_linear.weight", (2 * inner, hidden))),
            place(weights.take(f"{prefix}.shared_mlp.output_linear.weight", (hidden, inner))),
        )
        after = _experts(config, f"{prefix}.block_sparse_moe", shared, weights, place)
        return pre_normed(config, index, weights, place, mixer, after, scale=config["residual_multiplier"])

    context_length, rotaries = config["max_position_embeddings"], {}
    if rope is not None:
        rotaries[rope] = Rotary.of(config["rope_parameters"], config, context_length, config["head_dim"])
    return Decoder(
        config, weights, dtype, device, make_layer, context_length=context_length, rotaries=rotaries,
        embedding_scale=config["embedding_multiplier"], logits_scale=1.0 / config["logits_scaling"],
    )  # fmt: skip


def normalise_mamba(config: dict[str, Any]) -> dict[str, Any]:
    """Defaults of a Mamba-2 layer as Bamba names them, filled in. Raises ModelError."""
    for name, default in (
        ("mamba_n_heads", 128), ("mamba_n_groups", 1), ("mamba_d_state", 256), ("mamba_d_conv", 4), ("mamba_expand", 2),
        ("mamba_conv_bias", True), ("mamba_proj_bias", False),
    ):  # fmt: skip
        config.setdefault(name, default)
    positive(config, "mamba_n_heads", "hidden_size")
    width = config.get("mamba_d_ssm") or int(config["mamba_expand"] * config["hidden_size"])
    if config.get("mamba_d_head") in (None, "auto"):
        config["mamba_d_head"] = width // config["mamba_n_heads"]
    require(config, {"mamba_d_head": lambda x: x * config["mamba_n_heads"] == width})
    config["time_step_limit"] = step_limit(config.get("time_step_limit"))
    return config


def _check_layers(config: dict[str, Any]) -> None:
    config["layer_types"] = [LAYER_TYPES.get(each, each) for each in config["layer_types"]]
    layers, kinds = config["num_hidden_layers"], set(LAYER_TYPES.values())
    require(config, {"layer_types": lambda x: len(x) == layers and set(x) <= kinds})


def _mixer(
    config: dict[str, Any], index: int, weights: Weights, place: Place, *, rope: str | None, scale: float | None = None
) -> Part:
    if config["layer_types"][index] == "full_attention":
        return Attention(config, index, weights, place, rope=rope, scale=scale)
    shape = Mamba2Shape.of(
        config, MAMBA_NAMES, limit=tuple(config["time_step_limit"]), biased=bool(config["mamba_proj_bias"]),
        conv_biased=bool(config["mamba_conv_bias"]),
    )  # fmt: skip
    prefix, eps = f"model.layers.{index}.mamba", config["rms_norm_eps"]
    return Mamba2(index, prefix, config["hidden_size"], shape, eps, weights, place)


def _normalised_granite(config: dict[str, Any]) -> dict[str, Any]:
    config = normalise_mamba(normalise_attention(config))
    for name, default in (
        ("embedding_multiplier", 1.0), ("logits_scaling", 1.0), ("residual_multiplier", 1.0),
        ("attention_multiplier", 1.0), ("num_local_experts", 8), ("num_experts_per_tok", 2),
        ("shared_intermediate_size", 1024), ("position_embedding_type", None),
    ):  # fmt: skip
        config.setdefault(name, default)
    if not config.get("layer_types"):
        given = config.get("layers_block_type")
        config["layer_types"] = given or ["linear_attention"] * config["num_hidden_layers"]
    _check_layers(config)
    positive(config, "shared_intermediate_size")
    if config["num_local_experts"]:
        positive(config, "num_local_experts", "num_experts_per_tok")
    require(
        config,
        {
            "position_embedding_type": lambda x: x in (None, "nope", "rope"),
            "num_experts_per_tok": lambda x: x <= (config["num_local_experts"] or x),
            "logits_scaling": lambda x: x > 0,
        },
    )
    return config


def _experts(config: dict[str, Any], prefix: str, shared: Part, weights: Weights, place: Place) -> Part:
    hidden, inner, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    if not count:
        return shared
    gate_up = weights.take(f"{prefix}.input_linear.weight", (count, 2 * inner, hidden))
    down = weights.take(f"{prefix}.output_linear.weight", (count, hidden, inner))
    return SoftmaxExperts(
        place(weights.take(f"{prefix}.router.layer.weight", (count, hidden))),
        ExpertFeedForward(place(gate_up), place(down)),
        top_k=config["num_experts_per_tok"],
        renormalize=True,
        shared=shared,  # type: ignore[arg-type]
    )

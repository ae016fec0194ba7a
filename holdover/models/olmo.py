"""OLMo 3, with sliding windows in most layers, and OLMo Hybrid, with gated DeltaNet in most.

Attention layers of both norm what a part gives, not what it takes. Source: OLMo Team, "OLMo 3" (2025).
"""

from typing import Any

import torch

from holdover.models.attention import Attention, normalise_attention
from holdover.models.decoder import Branch, Decoder, Place, feed_forward, pre_normed, take_norm
from holdover.models.delta_net import DeltaNet, DeltaNetWeights
from holdover.models.loader import Weights, positive, require
from holdover.models.rotary import Rotary, normal_rope

DELTA_NORM_EPS = 1e-5  # of o_norm, whatever rms_norm_eps says


def olmo3(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "olmo3". Raises ModelError."""
    config = _normalised_olmo3(config)
    context_length = config["max_position_embeddings"]

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        kind = config["layer_types"][index]
        window = config["sliding_window"] if kind == "sliding_attention" else None
        if window is not None and window >= context_length:  # all is seen anyway
            window = None
        attention = Attention(config, index, weights, place, query_key_norm="whole", window=window, rope=kind)
        return _post_normed(config, index, weights, place, attention)

    rotaries = {
        kind: Rotary.of(rope, config, context_length, config["head_dim"], exact=True)
        for kind, rope in config["rope_parameters"].items()
    }
    return Decoder(config, weights, dtype, device, make_layer, context_length=context_length, rotaries=rotaries)


def olmo_hybrid(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "olmo_hybrid". Raises ModelError."""
    config = _normalised_hybrid(config)
    rope = config["rope_parameters"]
    for index in range(config["num_hidden_layers"]):  # norms go by two names, in checkpoints of both kinds
        layer = f"model.layers.{index}"
        weights.rename(f"{layer}.attention_layer_norm.", f"{layer}.input_layernorm.")
        weights.rename(f"{layer}.feedforward_layer_norm.", f"{layer}.post_attention_layernorm.")

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        if config["layer_types"][index] == "full_attention":
            attention = Attention(
                config, index, weights, place, query_key_norm="whole", rope=None if rope is None else "default"
            )
            return _post_normed(config, index, weights, place, attention)
        mixer = DeltaNet(index, _delta_net(config, f"model.layers.{index}.linear_attn", weights, place))
        return pre_normed(config, index, weights, place, mixer, _dense(config, index, weights, place))

    context_length, rotaries = config["max_position_embeddings"], {}
    if rope is not None:
        rotaries["default"] = Rotary.of(rope, config, context_length, config["head_dim"], exact=True)
    return Decoder(config, weights, dtype, device, make_layer, context_length=context_length, rotaries=rotaries)


def _normalised_olmo3(config: dict[str, Any]) -> dict[str, Any]:
    given = config.get("rope_parameters") or {}
    by_kind = {kind: given[kind] for kind in ("full_attention", "sliding_attention") if kind in given}
    if by_kind:
        config = {**config, "rope_parameters": None}
    config = normalise_attention({"sliding_window": 4096, **config}, eps=1e-5)
    layers = config["num_hidden_layers"]
    if not config.get("layer_types"):
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[(i + 1) % 4 != 0] for i in range(layers)]
    scaled = config["rope_parameters"]
    plain = {"rope_type": "default", "rope_theta": scaled["rope_theta"]}
    config["rope_parameters"] = {  # rotary positions are scaled in layers that see everything
        "full_attention": normal_rope(by_kind.get("full_attention", scaled)),
        "sliding_attention": normal_rope(by_kind.get("sliding_attention", plain)),
    }
    positive(config, "sliding_window")
    require(
        config,
        {
            "layer_types": lambda x: len(x) == layers and set(x) <= {"full_attention", "sliding_attention"},
            "sliding_window": lambda x: x > 1,
        },
    )
    return config


def _normalised_hybrid(config: dict[str, Any]) -> dict[str, Any]:
    given = config.get("rope_parameters")
    no_positions = "rope_parameters" in config and (given is None or given.get("rope_theta") is None)
    config = normalise_attention(config)
    if no_positions:
        config["rope_parameters"] = None
    layers = config["num_hidden_layers"]
    if not config.get("layer_types"):
        kinds = ("full_attention", "linear_attention")
        config["layer_types"] = [kinds[(i + 1) % 4 != 0] for i in range(layers)]
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if config.get(name) is None:
            config[name] = config["num_attention_heads"]
    config.setdefault("linear_allow_neg_eigval", True)
    config.setdefault("linear_conv_kernel_dim", 4)
    positive(
        config, "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )  # fmt: skip
    require(
        config,
        {
            "layer_types": lambda x: len(x) == layers and set(x) <= {"full_attention", "linear_attention"},
            "linear_num_value_heads": lambda x: x % config["linear_num_key_heads"] == 0,
            "linear_conv_kernel_dim": lambda x: x >= 2,
        },
    )
    return config


def _dense(config: dict[str, Any], index: int, weights: Weights, place: Place) -> Any:
    prefixes = (f"model.layers.{index}.mlp",)
    return feed_forward(weights, place, prefixes, config["hidden_size"], config["intermediate_size"])


def _post_normed(
    config: dict[str, Any], index: int, weights: Weights, place: Place, attention: Attention
) -> tuple[Branch, Branch]:
    after_attention, after_dense = (
        take_norm(weights, place, f"model.layers.{index}.{name}.weight", config["hidden_size"])
        for name in ("post_attention_layernorm", "post_feedforward_layernorm")
    )
    dense = _dense(config, index, weights, place)
    return Branch(None, attention, out_norm=after_attention), Branch(None, dense, out_norm=after_dense)


def _delta_net(config: dict[str, Any], prefix: str, weights: Weights, place: Place) -> DeltaNetWeights:
    hidden, kernel = config["hidden_size"], config["linear_conv_kernel_dim"]
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    sizes = {"q": key_heads * key_dim, "k": key_heads * key_dim, "v": heads * value_dim}
    sizes |= {"g": heads * value_dim, "b": heads, "a": heads}
    inputs = [weights.take(f"{prefix}.{part}_proj.weight", (size, hidden)) for part, size in sizes.items()]
    conv = [weights.take(f"{prefix}.{part}_conv1d.weight", (sizes[part], 1, kernel)) for part in "qkv"]
    return DeltaNetWeights(
        key_heads, heads, key_dim, value_dim,
        inputs=place(torch.cat(inputs)),
        conv=place(torch.cat(conv).squeeze(1).t(), torch.float32),
        decay_rate=place(-weights.take(f"{prefix}.A_log", (heads,)).float().exp(), torch.float32),
        decay_bias=place(weights.take(f"{prefix}.dt_bias", (heads,)), torch.float32),
        norm=place(weights.take(f"{prefix}.o_norm.weight", (value_dim,)), torch.float32),
        eps=DELTA_NORM_EPS,
        output=place(weights.take(f"{prefix}.o_proj.weight", (hidden, heads * value_dim))),
        strength=2.0 if config["linear_allow_neg_eigval"] else 1.0,
    )  # fmt: skip

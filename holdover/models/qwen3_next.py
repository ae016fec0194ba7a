"""Qwen3-Next, and Qwen3.5, which is built like it: gated DeltaNet and gated attention, three to one.

Of checkpoints of Qwen3.5 that see pictures too, the language model is served. Source: Qwen Team, "Qwen3-Next" (2025).
"""

from typing import Any

import torch

from holdover.models.attention import Attention, normalise_attention
from holdover.models.decoder import Branch, Decoder, Part, Place, feed_forward, pre_normed
from holdover.models.delta_net import DeltaNet, DeltaNetWeights
from holdover.models.experts import SoftmaxExperts, stacked_experts
from holdover.models.loader import Weights, positive, require
from holdover.models.rotary import Rotary

HEAD_DIM = 256  # where config.json does not say
PARTIAL = 0.25  # of a head is turned, where config.json does not say
NOT_TEXT = r"^(mtp|model\.visual)\."


def qwen3_next(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "qwen3_next", "qwen3_5", "qwen3_5_moe" or their "_text". Raises ModelError."""
    config = _normalised(config)
    weights.leave(NOT_TEXT)
    weights.rename("model.language_model.", "model.")

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        if config["layer_types"][index] == "full_attention":
            mixer: Part = Attention(config, index, weights, place, query_key_norm="head", unit_offset=True, gated=True)
        else:
            mixer = DeltaNet(index, _delta_net(config, f"model.layers.{index}.linear_attn", weights, place))
        prefix = f"model.layers.{index}.mlp"
        if _is_sparse(config, index):
            after: Part = _experts(config, prefix, weights, place)
        else:
            after = feed_forward(weights, place, (prefix,), config["hidden_size"], config["intermediate_size"])
        return pre_normed(config, index, weights, place, mixer, after, unit_offset=True)

    context_length = config["max_position_embeddings"]
    rotary = Rotary.of(config["rope_parameters"], config, context_length, config["head_dim"])
    return Decoder(
        config, weights, dtype, device, make_layer, context_length=context_length, rotaries={"default": rotary},
        unit_offset=True,
    )  # fmt: skip


def _normalised(config: dict[str, Any]) -> dict[str, Any]:
    if "text_config" in config:  # it sees pictures too
        whole = config
        config = {**config["text_config"], "model_type": whole["model_type"]}
        for name in ("tie_word_embeddings", "eos_token_id"):
            if name in whole:
                config.setdefault(name, whole[name])
    sparse = config["model_type"] in ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
    if sparse:
        config = {"intermediate_size": 5632 if config["model_type"] == "qwen3_next" else 1, **config}
    config = normalise_attention(config, head_dim=HEAD_DIM, partial=PARTIAL)
    layers = config["num_hidden_layers"]
    if not config.get("layer_types"):
        every = config.get("full_attention_interval", 4)
        config["layer_types"] = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if not sparse:
        config["num_experts"] = 0
    config.setdefault("num_experts", 512)
    if config["num_experts"]:
        config.setdefault("num_experts_per_tok", 10)
        config.setdefault("norm_topk_prob", True)
        config.setdefault("decoder_sparse_step", 1)
        positive(
            config, "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
            "decoder_sparse_step",
        )  # fmt: skip
    positive(
        config, "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )  # fmt: skip
    require(
        config,
        {
            "layer_types": lambda x: len(x) == layers and set(x) <= {"full_attention", "linear_attention"},
            "num_experts_per_tok": lambda x: x <= (config["num_experts"] or x),
            "linear_num_value_heads": lambda x: x % config["linear_num_key_heads"] == 0,
            "linear_conv_kernel_dim": lambda x: x >= 2,
            "output_gate_type": lambda x: x in (None, "swish", "silu"),
            "attn_output_gate": lambda x: x is not False,
        },
    )
    return config


def _is_sparse(config: dict[str, Any], index: int) -> bool:
    if not config["num_experts"] or index in (config.get("mlp_only_layers") or ()):
        return False
    return (index + 1) % int(config["decoder_sparse_step"]) == 0


def _experts(config: dict[str, Any], prefix: str, weights: Weights, place: Place) -> SoftmaxExperts:
    """Routed experts, and a gated one that all tokens share."""
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    shared = (f"{prefix}.shared_expert",)
    return SoftmaxExperts(
        place(weights.take(f"{prefix}.gate.weight", (count, hidden))),
        stacked_experts(weights, place, f"{prefix}.experts", count, hidden, inner),
        top_k=config["num_experts_per_tok"],
        renormalize=bool(config["norm_topk_prob"]),
        shared=feed_forward(weights, place, shared, hidden, config["shared_expert_intermediate_size"]),
        shared_gate=place(weights.take(f"{prefix}.shared_expert_gate.weight", (1, hidden))),
    )


def _delta_net(config: dict[str, Any], prefix: str, weights: Weights, place: Place) -> DeltaNetWeights:
    hidden = config["hidden_size"]
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    keys, values, channels = key_heads * key_dim, heads * value_dim, 2 * key_heads * key_dim + heads * value_dim

    def take(name: str, rows: int) -> torch.Tensor:
        return weights.take(f"{prefix}.{name}.weight", (rows, hidden))

    if weights.has(f"{prefix}.in_proj_qkvz.weight"):  # of each key head: its query, key, values, gates
        shared = heads // key_heads * value_dim
        fused = take("in_proj_qkvz", channels + values).view(key_heads, -1, hidden)
        parts = [each.reshape(-1, hidden) for each in torch.split(fused, [key_dim, key_dim, shared, shared], 1)]
        strengths = take("in_proj_ba", 2 * heads).view(key_heads, 2, -1, hidden)
        parts += [each.reshape(-1, hidden) for each in strengths.unbind(1)]
    else:
        parts = [take("in_proj_qkv", channels), take("in_proj_z", values)]
        parts += [take("in_proj_b", heads), take("in_proj_a", heads)]
    assert sum(map(len, parts)) == 2 * keys + 2 * values + 2 * heads
    kernel = config["linear_conv_kernel_dim"]
    conv = weights.take(f"{prefix}.conv1d.weight", (channels, 1, kernel)).squeeze(1).t()
    return DeltaNetWeights(
        key_heads, heads, key_dim, value_dim,
        inputs=place(torch.cat(parts)),
        conv=place(conv, torch.float32),
        decay_rate=place(-weights.take(f"{prefix}.A_log", (heads,)).float().exp(), torch.float32),
        decay_bias=place(weights.take(f"{prefix}.dt_bias", (heads,)), torch.float32),
        norm=place(weights.take(f"{prefix}.norm.weight", (value_dim,)), torch.float32),
        eps=config["rms_norm_eps"],
        output=place(weights.take(f"{prefix}.out_proj.weight", (hidden, values))),
    )  # fmt: skip

"""Kimi-Linear: Kimi delta attention, multi-head latent attention without positions, and a mixture of experts.

Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).
"""

from typing import Any

import torch

from holdover.models.base import Batch
from holdover.models.decoder import Arrays, Branch, Decoder, Place, Turns, feed_forward, pre_normed
from holdover.models.experts import MIXTRAL, SigmoidExperts, stacked_experts
from holdover.models.latent import LatentAttention
from holdover.models.loader import Weights, positive, require
from holdover.ops.delta import kimi_delta_attention
from holdover.ops.linear import HeadLinear, Linear
from holdover.state.layout import ArraySpec
from holdover.state.pool import DevicePool


def kimi_linear(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "kimi_linear". Raises ModelError."""
    config = _normalised(config)

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        full = config["layer_types"][index] == "full_attention"
        mixer = (LatentAttention if full else DeltaAttention)(config, index, weights, place)
        prefix = f"model.layers.{index}"
        if config["mlp_layer_types"][index] == "sparse":
            return pre_normed(config, index, weights, place, mixer, _experts(config, prefix, weights, place))
        prefixes = (f"{prefix}.mlp", f"{prefix}.block_sparse_moe")
        dense = feed_forward(weights, place, prefixes, config["hidden_size"], config["intermediate_size"])
        return pre_normed(config, index, weights, place, mixer, dense)

    return Decoder(config, weights, dtype, device, make_layer, context_length=config["model_max_length"])


def _normalised(config: dict[str, Any]) -> dict[str, Any]:
    """One form for the two that config.json comes in: Moonshot's own, and the one that Transformers saves."""
    config = dict(config)
    linear = config.pop("linear_attn_config", None) or {}
    layers = config.get("num_hidden_layers", 0)
    positive({**config, "num_hidden_layers": layers}, "num_hidden_layers", "hidden_size", "vocab_size")
    for short, name in (
        ("head_dim", "linear_head_dim"),
        ("num_heads", "linear_num_heads"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    ):
        if short in linear:
            config[name] = linear[short]
    if not config.get("layer_types"):
        full = set(linear.get("full_attn_layers", ())) or {i + 1 for i in range(1, layers) if i % 4 == 0}
        config["layer_types"] = ["full_attention" if i + 1 in full else "linear_attention" for i in range(layers)]
    if not config.get("mlp_layer_types"):
        dense = config.get("first_k_dense_replace", 1)
        config["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(layers)]
    for ours, theirs, default in (
        ("model_max_length", "max_position_embeddings", 1 << 20),
        ("moe_renormalize", "norm_topk_prob", True),
        ("num_expert_group", "n_group", 1),
        ("num_experts", "num_local_experts", 256),
        ("num_experts_per_token", "num_experts_per_tok", 8),
        ("num_shared_experts", "n_shared_experts", 1),
    ):
        config.setdefault(ours, config.get(theirs, default))
    config.setdefault("topk_group", 1)
    config.setdefault("rms_norm_eps", 1e-5)
    config.setdefault("routed_scaling_factor", 1.0)
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config.get("num_attention_heads")
    positive(
        config, "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
        "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "intermediate_size", "model_max_length",
    )  # fmt: skip
    require(
        config,
        {
            "hidden_act": lambda x: x == "silu",
            "attention_bias": lambda x: not x,
            "quantization_config": lambda x: not x,
            "mla_use_nope": lambda x: x is not False,
            "moe_router_activation_func": lambda x: x == "sigmoid",
            "moe_layer_freq": lambda x: x == 1,
            "num_nextn_predict_layers": lambda x: not x,
            "num_key_value_heads": lambda x: x == config["num_attention_heads"],
            "linear_conv_kernel_dim": lambda x: x >= 2,
            "topk_group": lambda x: x <= config["num_expert_group"],
            "layer_types": lambda x: len(x) == layers and set(x) <= {"full_attention", "linear_attention"},
            "mlp_layer_types": lambda x: len(x) == layers and set(x) <= {"dense", "sparse"},
        },
    )
    return config


def _experts(config: dict[str, Any], prefix: str, weights: Weights, place: Place) -> SigmoidExperts:
    """Routed experts and the shared one."""
    positive(config, "num_experts", "num_experts_per_token", "moe_intermediate_size", "num_shared_experts")
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    prefix = f"{prefix}.block_sparse_moe"
    router = place(weights.take(f"{prefix}.gate.weight", (count, hidden)), torch.float32)
    bias = place(weights.take(f"{prefix}.gate.e_score_correction_bias", (count,)), torch.float32)
    experts = stacked_experts(weights, place, f"{prefix}.experts", count, hidden, inner, MIXTRAL)
    shared = feed_forward(weights, place, (f"{prefix}.shared_experts",), hidden, inner * config["num_shared_experts"])
    settings = {
        "num_experts_per_tok": config["num_experts_per_token"], "n_group": config["num_expert_group"],
        "topk_group": config["topk_group"], "norm_topk_prob": config["moe_renormalize"],
        "routed_scaling_factor": config["routed_scaling_factor"],
    }  # fmt: skip
    return SigmoidExperts(settings, router, bias, experts, shared)


class DeltaAttention:
    """KDA. Snapshot state: the recurrent matrix of each head, and the convolution's last inputs."""

    def __init__(self, config: dict[str, Any], index: int, weights: Weights, place: Place) -> None:
        prefix, hidden = f"model.layers.{index}.self_attn", config["hidden_size"]
        self.recurrent_name, self.conv_name = f"layers.{index}.recurrent", f"layers.{index}.conv"
        self.heads: int = config["linear_num_heads"]
        self.head_dim: int = config["linear_head_dim"]
        self.kernel: int = config["linear_conv_kernel_dim"]
        self.eps: float = config["rms_norm_eps"]
        width = self.heads * self.head_dim
        self.width = width

        def take(part: str, shape: tuple[int, ...]) -> torch.Tensor:
            return weights.take(f"{prefix}.{part}", shape)

        inputs = [take(f"{part}_proj.weight", (width, hidden)) for part in "qkv"]
        inputs += [take(f"{part}_a_proj.weight", (self.head_dim, hidden)) for part in "fg"]
        inputs.append(take("b_proj.weight", (self.heads, hidden)))
        self.inputs = Linear(place(torch.cat(inputs)))
        up = [take(f"{part}_b_proj.weight", (width, self.head_dim)) for part in "fg"]
        self.decay_and_gate_up = HeadLinear(place(torch.stack(up)))
        convolutions = [take(f"{part}_conv1d.weight", (width, 1, self.kernel)) for part in "qkv"]
        self.conv_weight = place(torch.cat(convolutions).squeeze(1).t(), torch.float32)
        self.decay_bias = place(take("dt_bias", (width,)), torch.float32)
        rate = take("A_log", (1, 1, self.heads, 1)).float().exp().view(self.heads, 1)
        self.decay_rate = place(-rate.expand(self.heads, self.head_dim).reshape(-1), torch.float32)
        self.norm = place(take("o_norm.weight", (self.head_dim,)), torch.float32)
        self.output = Linear(place(take("o_proj.weight", (hidden, width))))

    def arrays(self, dtype: torch.dtype) -> Arrays:
        return Arrays(
            snapshot=[
                ArraySpec(self.recurrent_name, (self.heads, self.head_dim, self.head_dim), torch.float32),
                ArraySpec(self.conv_name, (self.kernel - 1, 3 * self.width), dtype),
            ]
        )

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turns: Turns) -> torch.Tensor:
        parts = self.inputs(x)
        mixed, low, beta = torch.split(parts, [3 * self.width, 2 * self.head_dim, self.heads], 1)
        decay_and_gate = torch.empty(len(x), 2, self.width, dtype=x.dtype, device=x.device)
        self.decay_and_gate_up(low.view(len(low), 2, -1), decay_and_gate)
        decay, gate = decay_and_gate.unbind(1)
        out = kimi_delta_attention(
            mixed,
            decay,
            self.decay_bias,
            self.decay_rate,
            beta,
            gate,
            self.conv_weight,
            self.norm,
            self.eps,
            pool.live_views[self.recurrent_name],
            pool.live_views[self.conv_name],
            batch.live_sequences(pool),
        )
        return self.output(out)

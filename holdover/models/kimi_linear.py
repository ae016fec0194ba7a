"""Kimi-Linear: Kimi delta attention, multi-head latent attention without positions, and a mixture of experts.

Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).
"""

from typing import Any

import torch

from holdover.models.base import Batch
from holdover.models.decoder import Arrays, Decoder, Layer, Place, Turn, feed_forward, layer_norms
from holdover.models.loader import Weights, positive, require
from holdover.ops.attention import latent_attention
from holdover.ops.delta import kimi_delta_attention
from holdover.ops.experts import ExpertFeedForward, route_sigmoid
from holdover.ops.linear import HeadLinear, Linear
from holdover.ops.norm import rms_norm
from holdover.state.layout import ArraySpec
from holdover.state.pool import DevicePool

LATENT_NORM_EPS = 1e-6  # of kv_a_layernorm and q_a_layernorm, whatever rms_norm_eps says


def kimi_linear(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "kimi_linear". Raises ModelError."""
    config = _normalised(config)

    def make_layer(index: int, weights: Weights, place: Place) -> Layer:
        input_norm, post_norm = layer_norms(config, index, weights, place)
        attention = LatentAttention if config["layer_types"][index] == "full_attention" else DeltaAttention
        mixer = attention(config, index, weights, place, config["rms_norm_eps"])
        prefix = f"model.layers.{index}"
        if config["mlp_layer_types"][index] == "sparse":
            return Layer(input_norm, mixer, post_norm, Experts(config, prefix, weights, place))
        prefixes = (f"{prefix}.mlp", f"{prefix}.block_sparse_moe")
        dense = feed_forward(weights, place, prefixes, config["hidden_size"], config["intermediate_size"])
        return Layer(input_norm, mixer, post_norm, dense)

    context_length = config["model_max_length"]
    return Decoder(config, weights, dtype, device, make_layer, context_length=context_length, rotary=False)


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
            "layer_types": lambda x: len(x) == layers and set(x) <= {"full_attention", "linear_attention"},
            "mlp_layer_types": lambda x: len(x) == layers and set(x) <= {"dense", "sparse"},
        },
    )
    return config


class Experts:
    """Routed experts and the shared one."""

    def __init__(self, config: dict[str, Any], prefix: str, weights: Weights, place: Place) -> None:
        positive(config, "num_experts", "num_experts_per_token", "moe_intermediate_size", "num_shared_experts")
        hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
        prefix = f"{prefix}.block_sparse_moe"
        self.router = place(weights.take(f"{prefix}.gate.weight", (count, hidden)), torch.float32)
        self.bias = place(weights.take(f"{prefix}.gate.e_score_correction_bias", (count,)), torch.float32)
        gate_up, down = [], []
        for i in range(count):
            gate = weights.take(f"{prefix}.experts.{i}.w1.weight", (inner, hidden))
            up = weights.take(f"{prefix}.experts.{i}.w3.weight", (inner, hidden))
            gate_up.append(torch.cat([gate, up]))
            down.append(weights.take(f"{prefix}.experts.{i}.w2.weight", (hidden, inner)))
        self.experts = ExpertFeedForward(place(torch.stack(gate_up)), place(torch.stack(down)))
        self.shared = feed_forward(
            weights, place, (f"{prefix}.shared_experts",), hidden, inner * config["num_shared_experts"]
        )
        self.top_k: int = config["num_experts_per_token"]
        self.num_groups: int = config["num_expert_group"]
        self.top_groups: int = config["topk_group"]
        self.renormalize = bool(config["moe_renormalize"])
        self.scaling: float = config["routed_scaling_factor"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        routed, experts = route_sigmoid(
            x,
            self.router,
            self.bias,
            top_k=self.top_k,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            renormalize=self.renormalize,
            scaling=self.scaling,
        )
        return self.experts(x, routed, experts, self.shared(x))


class LatentAttention:
    """MLA without rotary positions. Token state: the latent and the key part that all heads share."""

    def __init__(self, config: dict[str, Any], index: int, weights: Weights, place: Place, eps: float) -> None:
        prefix, hidden = f"model.layers.{index}.self_attn", config["hidden_size"]
        self.name = f"layers.{index}.latent"
        self.heads: int = config["num_attention_heads"]
        self.latent_dim: int = config["kv_lora_rank"]
        self.nope_dim: int = config["qk_nope_head_dim"]
        self.shared_dim: int = config["qk_rope_head_dim"]
        self.value_dim: int = config["v_head_dim"]
        self.scale = (self.nope_dim + self.shared_dim) ** -0.5
        width, rank = self.heads * (self.nope_dim + self.shared_dim), config.get("q_lora_rank")
        latent = weights.take(f"{prefix}.kv_a_proj_with_mqa.weight", (self.latent_dim + self.shared_dim, hidden))
        down = "q_proj" if rank is None else "q_a_proj"
        query = weights.take(f"{prefix}.{down}.weight", (width if rank is None else rank, hidden))
        self.query_norm: torch.Tensor | None = None
        if rank is not None:
            self.query_norm = place(weights.take(f"{prefix}.q_a_layernorm.weight", (rank,)), torch.float32)
            self.query_up = Linear(place(weights.take(f"{prefix}.q_b_proj.weight", (width, rank))))
        self.inputs = Linear(place(torch.cat([query, latent])))
        self.latent_norm = place(weights.take(f"{prefix}.kv_a_layernorm.weight", (self.latent_dim,)), torch.float32)
        expand = weights.take(
            f"{prefix}.kv_b_proj.weight", (self.heads * (self.nope_dim + self.value_dim), self.latent_dim)
        ).view(self.heads, self.nope_dim + self.value_dim, self.latent_dim)
        # Absorbed form: queries are turned into the latents' space, and weighted latents into values, head by head.
        self.absorb = HeadLinear(place(expand[:, : self.nope_dim].transpose(1, 2)))
        self.expand = HeadLinear(place(expand[:, self.nope_dim :]))
        self.output = Linear(place(weights.take(f"{prefix}.o_proj.weight", (hidden, self.heads * self.value_dim))))

    def arrays(self, dtype: torch.dtype) -> Arrays:
        return Arrays(token=[ArraySpec(self.name, (self.latent_dim + self.shared_dim,), dtype)])

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turn: Turn) -> torch.Tensor:
        q, new = torch.tensor_split(self.inputs(x), (-self.latent_dim - self.shared_dim,), 1)
        if self.query_norm is not None:
            q = self.query_up(rms_norm(q.contiguous(), self.query_norm, LATENT_NORM_EPS))
        q = q.view(len(q), self.heads, -1)
        latent = new[:, : self.latent_dim]
        latent.copy_(rms_norm(latent.contiguous(), self.latent_norm, LATENT_NORM_EPS))
        rows = pool.token_views[self.name]
        rows[batch.slots] = new[: batch.num_tokens]
        absorbed = torch.empty(len(x), self.heads, self.latent_dim + self.shared_dim, dtype=x.dtype, device=x.device)
        absorbed[..., self.latent_dim :] = q[..., self.nope_dim :]
        self.absorb(q[..., : self.nope_dim], absorbed[..., : self.latent_dim])
        tables = [sequence.table for sequence in batch.sequences]
        out = latent_attention(absorbed, rows, self.latent_dim, self.scale, batch.bounds, tables)
        values = torch.empty(len(x), self.heads, self.value_dim, dtype=x.dtype, device=x.device)
        self.expand(out, values)
        return self.output(values.flatten(1))


class DeltaAttention:
    """KDA. Snapshot state: the recurrent matrix of each head, and the convolution's last inputs."""

    def __init__(self, config: dict[str, Any], index: int, weights: Weights, place: Place, eps: float) -> None:
        prefix, hidden = f"model.layers.{index}.self_attn", config["hidden_size"]
        self.recurrent_name, self.conv_name = f"layers.{index}.recurrent", f"layers.{index}.conv"
        self.heads: int = config["linear_num_heads"]
        self.head_dim: int = config["linear_head_dim"]
        self.kernel: int = config["linear_conv_kernel_dim"]
        self.eps = eps
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

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turn: Turn) -> torch.Tensor:
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
            batch.delta_sequences(pool),
        )
        return self.output(out)

"""Qwen3, dense: grouped-query attention with normed queries and keys. Source: Qwen Team, "Qwen3" (2025)."""

from typing import Any

import torch
import torch.nn.functional as F

from holdover.models.base import Batch
from holdover.models.loader import Weights, positive, require
from holdover.ops.attention import causal_mask, grouped_query_attention
from holdover.ops.experts import FeedForward
from holdover.ops.linear import Linear
from holdover.ops.norm import rms_norm
from holdover.ops.rope import rope_table, rotate
from holdover.state.layout import LAST_HIDDEN, ArraySpec, Layout
from holdover.state.pool import DevicePool


class Qwen3:
    """A checkpoint of model_type "qwen3"."""

    def __init__(self, config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        config = _normalised(config)
        self.vocab_size: int = config["vocab_size"]
        self.context_length: int = config["max_position_embeddings"]
        self.device = device
        eos = config.get("eos_token_id")
        self.eos_token_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.eps: float = config["rms_norm_eps"]
        hidden = config["hidden_size"]

        def place(tensor: torch.Tensor, kind: torch.dtype = dtype) -> torch.Tensor:
            return tensor.to(device=device, dtype=kind).contiguous()

        self.embedding = place(weights.take("model.embed_tokens.weight", (self.vocab_size, hidden)))
        self.layers = [_Layer(config, i, weights, place) for i in range(config["num_hidden_layers"])]
        self.norm = place(weights.take("model.norm.weight", (hidden,)), torch.float32)
        tied = bool(config["tie_word_embeddings"])
        if tied and weights.has("lm_head.weight"):  # some checkpoints carry the tied copy
            weights.take("lm_head.weight", (self.vocab_size, hidden))
        self.head = Linear(self.embedding if tied else place(weights.take("lm_head.weight", (self.vocab_size, hidden))))
        weights.check_all_taken()
        cos, sin = rope_table(self.context_length, config["head_dim"], config["rope_theta"])
        self.cos, self.sin = place(cos), place(sin)
        self.layout = Layout(
            token_arrays=tuple(layer.array(dtype) for layer in self.layers),
            snapshot_arrays=(ArraySpec(LAST_HIDDEN, (hidden,), dtype),),
        )
        self.fingerprint = self.layout.fingerprint(weights.digest(), config)

    def forward(self, batch: Batch, pool: DevicePool) -> torch.Tensor:
        x = F.embedding(batch.token_ids, self.embedding)
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        delta = None
        for layer in self.layers:
            normed = rms_norm(x, layer.input_norm, self.eps, delta)
            delta = layer.attention(normed, cos, sin, batch, pool, self.eps)
            delta = layer.feed_forward(rms_norm(x, layer.post_norm, self.eps, delta))
        return rms_norm(x, self.norm, self.eps, delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).float()


def _normalised(config: dict[str, Any]) -> dict[str, Any]:
    """Defaults filled in; rotary settings in one form for the two that config.json comes in."""
    config = dict(config)
    positive(
        config, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings",
    )  # fmt: skip
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    config.setdefault("head_dim", 128)
    config.setdefault("rms_norm_eps", 1e-6)
    config.setdefault("tie_word_embeddings", False)
    rope = dict(config.pop("rope_parameters", None) or {})
    scaling = config.pop("rope_scaling", None)
    config["rope_theta"] = float(rope.pop("rope_theta", config.get("rope_theta", 10_000.0)))
    config["rope_scaling"] = {**rope, **(scaling or {})}
    positive(config, "num_key_value_heads", "head_dim")
    require(
        config,
        {
            "hidden_act": lambda x: x == "silu",
            "attention_bias": lambda x: not x,
            "quantization_config": lambda x: not x,
            "use_sliding_window": lambda x: not x,
            "layer_types": lambda x: x is None or set(x) <= {"full_attention"},
            "rope_scaling": lambda x: set(x.values()) <= {"default"} and set(x) <= {"rope_type", "type"},
            "head_dim": lambda x: x % 2 == 0,
            "num_key_value_heads": lambda x: config["num_attention_heads"] % x == 0,
        },
    )
    return config


class _Layer:
    """One decoder layer. Token state: keys (turned by their positions) and values."""

    def __init__(self, config: dict[str, Any], index: int, weights: Weights, place: Any) -> None:
        prefix, hidden = f"model.layers.{index}", config["hidden_size"]
        self.name = f"layers.{index}.kv"
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]

        def take(part: str, *shape: int) -> torch.Tensor:
            return weights.take(f"{prefix}.{part}.weight", shape)

        self.input_norm = place(take("input_layernorm", hidden), torch.float32)
        self.post_norm = place(take("post_attention_layernorm", hidden), torch.float32)
        self.query_norm = place(take("self_attn.q_norm", self.head_dim), torch.float32)
        self.key_norm = place(take("self_attn.k_norm", self.head_dim), torch.float32)
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inputs = [
            take(f"self_attn.{part}_proj", size, hidden)
            for part, size in zip("qkv", (width, kv_width, kv_width), strict=True)
        ]
        self.inputs = Linear(place(torch.cat(inputs)))
        self.output = Linear(place(take("self_attn.o_proj", hidden, width)))
        inner = config["intermediate_size"]
        gate_up = torch.cat([take("mlp.gate_proj", inner, hidden), take("mlp.up_proj", inner, hidden)])
        self.feed_forward = FeedForward(place(gate_up), place(take("mlp.down_proj", hidden, inner)))

    def array(self, dtype: torch.dtype) -> ArraySpec:
        return ArraySpec(self.name, (2, self.kv_heads, self.head_dim), dtype)

    def attention(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, pool: DevicePool, eps: float
    ) -> torch.Tensor:
        heads, kv_heads, head_dim = self.heads, self.kv_heads, self.head_dim
        q, k, v = torch.split(self.inputs(x).view(len(x), -1, head_dim), [heads, kv_heads, kv_heads], 1)
        q = rotate(rms_norm(q.contiguous(), self.query_norm, eps), cos, sin)
        k = rotate(rms_norm(k.contiguous(), self.key_norm, eps), cos, sin)
        rows = pool.token_views[self.name]
        rows[batch.slots] = torch.stack([k, v], dim=1)[: batch.num_tokens]
        out = torch.zeros(len(x), heads, head_dim, dtype=x.dtype, device=x.device)
        for (first, last), sequence in zip(batch.bounds, batch.sequences, strict=True):
            keys, values = rows.index_select(0, sequence.table).unbind(1)
            mask = causal_mask(last - first, len(keys), x.device)
            out[first:last] = grouped_query_attention(q[first:last], keys, values, head_dim**-0.5, mask)
        return self.output(out.flatten(1))

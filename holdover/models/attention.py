"""Grouped-query attention, over all tokens or a sliding window: of most dense models and of hybrids."""

from dataclasses import dataclass
from typing import Any

import torch

from holdover.models.base import Batch
from holdover.models.decoder import Arrays, Place, Turns, scaled, take_norm
from holdover.models.loader import Weights, positive, require
from holdover.models.rotary import normalise_rope
from holdover.ops.attention import causal_mask, grouped_query_attention
from holdover.ops.linear import Linear
from holdover.ops.norm import rms_norm
from holdover.ops.rope import rotate
from holdover.state.layout import ArraySpec
from holdover.state.pool import DevicePool


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """What a checkpoint calls the weights of an attention layer."""

    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"


class Attention:
    """Token state: keys (turned by their positions) and values; with a window, window rows of the same.

    window: how many tokens one sees, itself included; None for all. query_key_norm: queries and keys are normed first,
    each "head" by itself or the "whole" of them. rope: the name of its rotary positions, None for no positions. gated:
    what comes out goes through a gate that is projected beside the queries. sinks: each head has a score that nobody's
    value belongs to. Scales of what comes in, of keys and of what goes out go into the weights.
    """

    def __init__(
        self,
        config: dict[str, Any],
        index: int,
        weights: Weights,
        place: Place,
        *,
        prefix: str = "model.layers.{}.self_attn",
        names: AttentionNames | None = None,
        query_key_norm: str | None = None,
        unit_offset: bool = False,
        window: int | None = None,
        rope: str | None = "default",
        scale: float | None = None,
        gated: bool = False,
        sinks: bool = False,
        scales: tuple[float, float, float] = (1.0, 1.0, 1.0),
    ) -> None:
        prefix, hidden, names = prefix.format(index), config["hidden_size"], names or AttentionNames()
        self.name = f"layers.{index}.kv"
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.window, self.rope, self.gated = window, rope, gated
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.eps: float = config["rms_norm_eps"]
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        scale_in, scale_key, scale_out = scales
        self.norms: tuple[torch.Tensor, ...] = ()
        self.norms_heads = query_key_norm == "head"
        if query_key_norm is not None:
            sizes = (self.head_dim, self.head_dim) if self.norms_heads else (width, kv_width)
            self.norms = tuple(
                take_norm(weights, place, f"{prefix}.{name}.weight", size, unit_offset)
                for name, size in zip((names.query_norm, names.key_norm), sizes, strict=True)
            )

        def take(kind: str) -> torch.Tensor:
            """The projections to queries, keys, values and gates, one below the other."""
            columns = (hidden,) if kind == "weight" else ()
            rows = 2 * width if gated else width
            q = weights.take(f"{prefix}.q_proj.{kind}", (rows, *columns))
            gates = []
            if gated:  # those of each head follow its queries
                q, gate = q.view(self.heads, 2, self.head_dim, *columns).unbind(1)
                q, gates = q.reshape(width, *columns), [gate.reshape(width, *columns)]
            k = weights.take(f"{prefix}.k_proj.{kind}", (kv_width, *columns))
            v = weights.take(f"{prefix}.v_proj.{kind}", (kv_width, *columns))
            scale = scale_in if kind == "weight" else 1.0
            return torch.cat(
                [scaled(q, scale), scaled(k, scale * scale_key), *(scaled(each, scale) for each in (v, *gates))]
            )

        self.inputs = Linear(place(take("weight")))
        output = weights.take(f"{prefix}.{names.output}.weight", (hidden, width))
        self.output = Linear(place(scaled(output, scale_out)))
        self.biases: tuple[torch.Tensor, ...] = ()
        if config.get("attention_bias"):
            bias = weights.take(f"{prefix}.{names.output}.bias", (hidden,))
            self.biases = place(take("bias")), place(scaled(bias, scale_out))
        self.sinks = place(weights.take(f"{prefix}.sinks", (self.heads,))) if sinks else None

    def arrays(self, dtype: torch.dtype) -> Arrays:
        spec = ArraySpec(self.name, (2, self.kv_heads, self.head_dim), dtype)
        return Arrays(token=[spec]) if self.window is None else Arrays(rows_in_window=[spec], window=self.window - 1)

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turns: Turns) -> torch.Tensor:
        heads, kv_heads, head_dim = self.heads, self.kv_heads, self.head_dim
        inputs = self.inputs(x) if not self.biases else self.inputs(x) + self.biases[0]
        width, kv_width = heads * head_dim, kv_heads * head_dim
        flat = torch.split(inputs, [width, kv_width, kv_width, *([width] if self.gated else [])], 1)
        if self.norms and not self.norms_heads:
            flat = (*(self._normed(each, norm) for each, norm in zip(flat, self.norms, strict=False)), *flat[2:])
        q, k, v = (each.reshape(len(x), -1, head_dim) for each in flat[:3])
        if self.norms and self.norms_heads:
            q, k = (self._normed(each, norm) for each, norm in zip((q, k), self.norms, strict=True))
        if self.rope is not None:
            q, k = rotate(q, *turns[self.rope]), rotate(k, *turns[self.rope])
        new = torch.stack([k, v], dim=1)[: batch.num_tokens]
        rows, tables = self._keep(new, batch, pool)
        out = torch.zeros(len(x), heads, head_dim, dtype=x.dtype, device=x.device)
        for (first, last), table in zip(batch.bounds, tables, strict=True):
            keys, values = rows.index_select(0, table).unbind(1)
            mask = causal_mask(last - first, len(keys), x.device, self.window)
            out[first:last] = grouped_query_attention(q[first:last], keys, values, self.scale, mask, self.sinks)
        mixed = out.flatten(1)
        if self.gated:
            mixed = mixed * torch.sigmoid(flat[3])
        y = self.output(mixed)
        return y if not self.biases else y + self.biases[1]

    def _normed(self, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.contiguous(), norm, self.eps)

    def _keep(self, new: torch.Tensor, batch: Batch, pool: DevicePool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Write the new rows; returns the view of all rows, and the slots of those that each sequence sees."""
        if self.window is None:
            rows = pool.token_views[self.name]
            rows[batch.slots] = new
            return rows, [sequence.table for sequence in batch.sequences]
        page, rows = pool.window_views[self.name]
        tables = []
        for (first, last), sequence in zip(batch.bounds, batch.sequences, strict=True):
            assert sequence.window is not None
            tables.append(sequence.window[-(self.window - 1 + last - first) :, page])
            rows[tables[-1][first - last :]] = new[first:last]
        return rows, tables


def normalise_heads(config: dict[str, Any], head_dim: int | None = None) -> None:
    """Heads and their sizes filled in. head_dim: where config.json does not say; None for hidden_size /
    num_attention_heads. Raises ModelError."""
    positive(config, "hidden_size", "num_attention_heads")
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if config.get("head_dim") is None:
        config["head_dim"] = head_dim or config["hidden_size"] // config["num_attention_heads"]
    positive(config, "num_key_value_heads", "head_dim")
    require(config, {"num_key_value_heads": lambda x: config["num_attention_heads"] % x == 0})


def normalise_attention(
    config: dict[str, Any], *, head_dim: int | None = None, eps: float = 1e-6, partial: float | None = None
) -> dict[str, Any]:
    """Defaults of a decoder with attention filled in, and what would change the result and is not implemented refused
    by name. head_dim, partial: as `normalise_heads` and `normalise_rope` say. Raises ModelError."""
    config = dict(config)
    positive(
        config, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings",
    )  # fmt: skip
    normalise_heads(config, head_dim)
    config.setdefault("rms_norm_eps", eps)
    config.setdefault("tie_word_embeddings", False)
    normalise_rope(config, partial=partial)
    require(
        config,
        {
            "hidden_act": lambda x: x == "silu",
            "mlp_bias": lambda x: not x,
            "pretraining_tp": lambda x: x == 1,
            "quantization_config": lambda x: not x,
            "head_dim": lambda x: x % 2 == 0,
        },
    )
    return config

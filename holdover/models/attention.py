"""Grouped-query attention with rotary positions, over all tokens or a sliding window: of most dense models."""

from typing import Any

import torch

from holdover.models.base import Batch
from holdover.models.decoder import Arrays, Place, Turn
from holdover.models.loader import Weights, positive, require
from holdover.models.rotary import normalise_rope
from holdover.ops.attention import causal_mask, grouped_query_attention
from holdover.ops.linear import Linear
from holdover.ops.norm import rms_norm
from holdover.ops.rope import rotate
from holdover.state.layout import ArraySpec
from holdover.state.pool import DevicePool


class Attention:
    """Token state: keys (turned by their positions) and values; with a window, window rows of the same.

    window: how many tokens one sees, itself included; None for all. query_key_norm: each head's queries and keys are
    normed first.
    """

    def __init__(
        self,
        config: dict[str, Any],
        index: int,
        weights: Weights,
        place: Place,
        *,
        query_key_norm: bool = False,
        window: int | None = None,
    ) -> None:
        prefix, hidden = f"model.layers.{index}.self_attn", config["hidden_size"]
        self.name = f"layers.{index}.kv"
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.window = window
        self.eps: float = config["rms_norm_eps"]
        self.norms: tuple[torch.Tensor, ...] = ()
        if query_key_norm:
            self.norms = tuple(
                place(weights.take(f"{prefix}.{part}_norm.weight", (self.head_dim,)), torch.float32) for part in "qk"
            )
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = dict(zip("qkv", (width, kv_width, kv_width), strict=True))
        self.inputs = Linear(
            place(torch.cat([weights.take(f"{prefix}.{each}_proj.weight", (n, hidden)) for each, n in sizes.items()]))
        )
        self.output = Linear(place(weights.take(f"{prefix}.o_proj.weight", (hidden, width))))
        self.biases: tuple[torch.Tensor, ...] = ()
        if config.get("attention_bias"):
            inputs = torch.cat([weights.take(f"{prefix}.{each}_proj.bias", (n,)) for each, n in sizes.items()])
            self.biases = place(inputs), place(weights.take(f"{prefix}.o_proj.bias", (hidden,)))

    def arrays(self, dtype: torch.dtype) -> Arrays:
        spec = ArraySpec(self.name, (2, self.kv_heads, self.head_dim), dtype)
        return Arrays(token=[spec]) if self.window is None else Arrays(rows_in_window=[spec], window=self.window - 1)

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turn: Turn) -> torch.Tensor:
        heads, kv_heads, head_dim = self.heads, self.kv_heads, self.head_dim
        inputs = self.inputs(x) if not self.biases else self.inputs(x) + self.biases[0]
        q, k, v = torch.split(inputs.view(len(x), -1, head_dim), [heads, kv_heads, kv_heads], 1)
        if self.norms:
            q, k = (rms_norm(each.contiguous(), norm, self.eps) for each, norm in zip((q, k), self.norms, strict=True))
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        new = torch.stack([k, v], dim=1)[: batch.num_tokens]
        rows, tables = self._keep(new, batch, pool)
        out = torch.zeros(len(x), heads, head_dim, dtype=x.dtype, device=x.device)
        for (first, last), table in zip(batch.bounds, tables, strict=True):
            keys, values = rows.index_select(0, table).unbind(1)
            mask = causal_mask(last - first, len(keys), x.device, self.window)
            out[first:last] = grouped_query_attention(q[first:last], keys, values, head_dim**-0.5, mask)
        y = self.output(out.flatten(1))
        return y if not self.biases else y + self.biases[1]

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


def normalise_attention(config: dict[str, Any], *, head_dim: int | None = None, eps: float = 1e-6) -> dict[str, Any]:
    """Defaults filled in, and what would change the result and is not implemented refused by name. head_dim: where
    config.json does not say; None for hidden_size / num_attention_heads. Raises ModelError."""
    config = dict(config)
    positive(
        config, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings",
    )  # fmt: skip
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if config.get("head_dim") is None:
        config["head_dim"] = head_dim or config["hidden_size"] // config["num_attention_heads"]
    config.setdefault("rms_norm_eps", eps)
    config.setdefault("tie_word_embeddings", False)
    normalise_rope(config)
    positive(config, "num_key_value_heads", "head_dim")
    require(
        config,
        {
            "hidden_act": lambda x: x == "silu",
            "mlp_bias": lambda x: not x,
            "pretraining_tp": lambda x: x == 1,
            "quantization_config": lambda x: not x,
            "head_dim": lambda x: x % 2 == 0,
            "partial_rotary_factor": lambda x: x == 1,
            "layer_types": lambda x: x is None or len(set(x)) == 1,
            "num_key_value_heads": lambda x: config["num_attention_heads"] % x == 0,
        },
    )
    return config

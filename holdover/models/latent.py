"""Multi-head latent attention, with rotary positions or none."""

from typing import Any

import torch

from holdover.models.base import Batch
from holdover.models.decoder import Arrays, Place, Turns, take_norm
from holdover.models.loader import Weights
from holdover.ops.attention import latent_attention
from holdover.ops.linear import HeadLinear, Linear
from holdover.ops.norm import rms_norm
from holdover.ops.rope import rotate
from holdover.state.layout import ArraySpec
from holdover.state.pool import DevicePool

LATENT_NORM_EPS = 1e-6  # of kv_a_layernorm and q_a_layernorm, whatever rms_norm_eps says


class LatentAttention:
    """Token state: the latent and the key part that all heads share, turned by its position if there are any.

    rope: the name of its rotary positions, None for none. interleaved: the checkpoint's rotary dimensions lie in pairs.
    scale: of the scores, None for the plain one. Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
    """

    def __init__(
        self,
        config: dict[str, Any],
        index: int,
        weights: Weights,
        place: Place,
        *,
        rope: str | None = None,
        interleaved: bool = False,
        scale: float | None = None,
    ) -> None:
        prefix, hidden = f"model.layers.{index}.self_attn", config["hidden_size"]
        self.name = f"layers.{index}.latent"
        self.rope = rope
        self.heads: int = config["num_attention_heads"]
        self.latent_dim: int = config["kv_lora_rank"]
        self.nope_dim: int = config["qk_nope_head_dim"]
        self.shared_dim: int = config["qk_rope_head_dim"]
        self.value_dim: int = config["v_head_dim"]
        self.scale = (self.nope_dim + self.shared_dim) ** -0.5 if scale is None else scale
        biased = bool(config.get("attention_bias"))
        width, rank = self.heads * (self.nope_dim + self.shared_dim), config.get("q_lora_rank")

        def apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
            """The rotary rows of each head, its last, with the first of each pair before the second of each."""
            if not interleaved:
                return weight
            each = weight.view(heads, -1, *weight.shape[1:])
            turned = each[:, -self.shared_dim :]
            turned = torch.cat([turned[:, 0::2], turned[:, 1::2]], dim=1)
            return torch.cat([each[:, : -self.shared_dim], turned], dim=1).view_as(weight)

        def take_latent(kind: str) -> torch.Tensor:
            shape = (self.latent_dim + self.shared_dim, *((hidden,) if kind == "weight" else ()))
            return apart(weights.take(f"{prefix}.kv_a_proj_with_mqa.{kind}", shape), 1)

        self.query_norm: torch.Tensor | None = None
        if rank is None:
            query = apart(weights.take(f"{prefix}.q_proj.weight", (width, hidden)), self.heads)
        else:
            query = weights.take(f"{prefix}.q_a_proj.weight", (rank, hidden))
            self.query_norm = take_norm(weights, place, f"{prefix}.q_a_layernorm.weight", rank)
            up = weights.take(f"{prefix}.q_b_proj.weight", (width, rank))
            self.query_up = Linear(place(apart(up, self.heads)))
        self.inputs = Linear(place(torch.cat([query, take_latent("weight")])))
        self.latent_norm = take_norm(weights, place, f"{prefix}.kv_a_layernorm.weight", self.latent_dim)
        expand = weights.take(
            f"{prefix}.kv_b_proj.weight", (self.heads * (self.nope_dim + self.value_dim), self.latent_dim)
        ).view(self.heads, self.nope_dim + self.value_dim, self.latent_dim)
        # Absorbed form: queries are turned into the latents' space, and weighted latents into values, head by head.
        self.absorb = HeadLinear(place(expand[:, : self.nope_dim].transpose(1, 2)))
        self.expand = HeadLinear(place(expand[:, self.nope_dim :]))
        self.output = Linear(place(weights.take(f"{prefix}.o_proj.weight", (hidden, self.heads * self.value_dim))))
        self.biases: tuple[torch.Tensor, ...] = ()
        if biased:
            bias = torch.zeros(width) if rank is None else weights.take(f"{prefix}.q_a_proj.bias", (rank,)).float()
            bias = torch.cat([bias, take_latent("bias").float()])
            self.biases = place(bias), place(weights.take(f"{prefix}.o_proj.bias", (hidden,)))

    def arrays(self, dtype: torch.dtype) -> Arrays:
        return Arrays(token=[ArraySpec(self.name, (self.latent_dim + self.shared_dim,), dtype)])

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turns: Turns) -> torch.Tensor:
        inputs = self.inputs(x) if not self.biases else self.inputs(x) + self.biases[0]
        q, new = torch.tensor_split(inputs, (-self.latent_dim - self.shared_dim,), 1)
        if self.query_norm is not None:
            q = self.query_up(rms_norm(q.contiguous(), self.query_norm, LATENT_NORM_EPS))
        q = q.view(len(q), self.heads, -1)
        latent, key, turned = new[:, : self.latent_dim], new[:, self.latent_dim :], q[..., self.nope_dim :]
        latent.copy_(rms_norm(latent.contiguous(), self.latent_norm, LATENT_NORM_EPS))
        if self.rope is not None:
            key.copy_(rotate(key.unsqueeze(1), *turns[self.rope]).squeeze(1))
            turned = rotate(turned, *turns[self.rope])
        rows = pool.token_views[self.name]
        rows[batch.slots] = new[: batch.num_tokens]
        absorbed = torch.empty(len(x), self.heads, self.latent_dim + self.shared_dim, dtype=x.dtype, device=x.device)
        absorbed[..., self.latent_dim :] = turned
        self.absorb(q[..., : self.nope_dim], absorbed[..., : self.latent_dim])
        tables = [sequence.table for sequence in batch.sequences]
        out = latent_attention(absorbed, rows, self.latent_dim, self.scale, batch.bounds, tables)
        values = torch.empty(len(x), self.heads, self.value_dim, dtype=x.dtype, device=x.device)
        self.expand(out, values)
        y = self.output(values.flatten(1))
        return y if not self.biases else y + self.biases[1]

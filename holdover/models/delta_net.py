"""Gated DeltaNet: a short convolution, the gated delta rule and a gated norm, of Qwen3-Next and OLMo Hybrid."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from holdover.models.base import Batch
from holdover.models.decoder import Arrays, Turns
from holdover.ops.conv import causal_conv
from holdover.ops.linear import Linear
from holdover.ops.norm import rms_norm
from holdover.ops.recurrence import outer_recurrence
from holdover.state.layout import ArraySpec
from holdover.state.pool import DevicePool

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """What a checkpoint has of one layer, placed. heads: of values; each of the key_heads serves heads / key_heads.

    inputs: [2 * key_heads * key_dim + 2 * heads * value_dim + 2 * heads, hidden], the projections to queries, keys,
    values, gates, strengths and decays. conv: float32 [kernel, channels of q, k and v]. decay_rate, decay_bias: float32
    [heads], rates below 0. norm: float32 [value_dim]. strength: what the sigmoid of a strength is multiplied by.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    inputs: torch.Tensor
    conv: torch.Tensor
    decay_rate: torch.Tensor
    decay_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    output: torch.Tensor
    strength: float = 1.0


class DeltaNet:
    """Snapshot state: the recurrent matrix of each head, and the convolution's last inputs.

    Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).
    """

    def __init__(self, index: int, weights: DeltaNetWeights) -> None:
        self.recurrent_name, self.conv_name = f"layers.{index}.recurrent", f"layers.{index}.conv"
        self.weights = weights
        self.inputs, self.output = Linear(weights.inputs), Linear(weights.output)
        self.kernel, self.channels = weights.conv.shape

    def arrays(self, dtype: torch.dtype) -> Arrays:
        w = self.weights
        return Arrays(
            snapshot=[
                ArraySpec(self.recurrent_name, (w.heads, w.key_dim, w.value_dim), torch.float32),
                ArraySpec(self.conv_name, (self.kernel - 1, self.channels), dtype),
            ]
        )

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turns: Turns) -> torch.Tensor:
        w, tokens = self.weights, len(x)
        keys, values = w.key_heads * w.key_dim, w.heads * w.value_dim
        mixed, gate, strength, decay = torch.split(self.inputs(x), [self.channels, values, w.heads, w.heads], 1)
        sequences = batch.live_sequences(pool)
        mixed = causal_conv(mixed, w.conv, None, pool.live_views[self.conv_name], sequences, silu=True)
        q, k, v = torch.split(mixed, [keys, keys, values], 1)
        q, k = (_unit(each.reshape(tokens, w.key_heads, w.key_dim)) for each in (q, k))
        out = outer_recurrence(
            q * w.key_dim**-0.5,
            k,
            v.view(tokens, w.heads, w.value_dim),
            torch.exp(w.decay_rate * F.softplus(decay.float() + w.decay_bias)),
            torch.sigmoid(strength.float()) * w.strength,
            pool.live_views[self.recurrent_name],
            sequences,
        )
        normed = rms_norm(out, w.norm, w.eps) * F.silu(gate.float()).view_as(out)
        return self.output(normed.flatten(1).to(x.dtype))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)

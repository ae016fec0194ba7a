"""State-space mixers: Mamba-2, with one decay a head, and Mamba-1, with one for each channel and state."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from holdover.errors import ModelError
from holdover.models.base import Batch
from holdover.models.decoder import Arrays, Place, Turns, scaled, take_norm
from holdover.models.loader import Weights, positive
from holdover.ops.conv import causal_conv
from holdover.ops.linear import Linear
from holdover.ops.norm import rms_norm
from holdover.ops.recurrence import outer_recurrence, selective_scan
from holdover.state.layout import ArraySpec
from holdover.state.pool import DevicePool


class Biased:
    """A projection with a bias, or without."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.linear, self.bias = Linear(weight), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y if self.bias is None else y + self.bias


def take_biased(
    weights: Weights,
    place: Place,
    name: str,
    shape: tuple[int, int],
    biased: bool,
    *,
    before: float = 1.0,
    each: torch.Tensor | None = None,
    behind: float = 1.0,
) -> Biased:
    """The projection `name`, with factors before and behind it, and `each` of its numbers, float32 [out_features]."""
    weight = scaled(weights.take(f"{name}.weight", shape), before * behind)
    bias = scaled(weights.take(f"{name}.bias", shape[:1]), behind) if biased else None
    if each is not None:
        weight = (weight.float() * each[:, None]).to(weight.dtype)
        bias = None if bias is None else (bias.float() * each).to(bias.dtype)
    return Biased(place(weight), None if bias is None else place(bias))


def step_limit(given: Any) -> list[float]:
    """time_step_limit as config.json has it: numbers, or objects where JSON has none. Raises ModelError."""
    if given is None:
        return [0.0, float("inf")]
    try:
        low, high = (float(each["__float__"] if isinstance(each, dict) else each) for each in given)
    except (TypeError, ValueError, KeyError):
        raise ModelError(f"config.json has time_step_limit = {str(given)[:200]}; it must be two numbers.") from None
    return [low, high]


def take_conv(
    weights: Weights, place: Place, name: str, channels: int, kernel: int, biased: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A convolution's filters, float32 [kernel, channels], and its bias, float32 [channels]."""
    weight = weights.take(f"{name}.weight", (channels, 1, kernel)).squeeze(1).t()
    bias = place(weights.take(f"{name}.bias", (channels,)), torch.float32) if biased else None
    return place(weight, torch.float32), bias


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """The sizes of a Mamba-2 layer, and how it is built. gated_norm: "gate first", "norm first", or None for a gate and
    no norm. limit: what a step is clamped to. before_scale: a factor on what comes in, in_scale: one for each number
    that is projected from it, out_scale: one on what goes out; they go into the weights."""

    heads: int
    head_dim: int
    groups: int
    states: int
    kernel: int
    limit: tuple[float, float]
    biased: bool
    conv_biased: bool
    gated_norm: str | None = "gate first"
    out_biased: bool | None = None
    before_scale: float = 1.0
    in_scale: torch.Tensor | None = None
    out_scale: float = 1.0

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.width + 2 * self.groups * self.states

    @classmethod
    def of(cls, config: dict[str, Any], names: dict[str, str], **built: Any) -> "Mamba2Shape":
        """From config.json, by its names for heads, head_dim, groups, states and kernel. Raises ModelError."""
        positive(config, *names.values())
        sizes = {name: config[theirs] for name, theirs in names.items()}
        if sizes["heads"] % sizes["groups"] or sizes["kernel"] < 2:
            raise ModelError(f"config.json has sizes that make no Mamba-2 layer: {sizes}.")
        return cls(**sizes, **built)


class Mamba2:
    """Snapshot state: a matrix [states, head_dim] of each head, and the convolution's last inputs.

    Source: Dao and Gu, "Transformers are SSMs" (2024).
    """

    def __init__(
        self, index: int, prefix: str, hidden: int, shape: Mamba2Shape, eps: float, weights: Weights, place: Place
    ) -> None:
        self.recurrent_name, self.conv_name = f"layers.{index}.recurrent", f"layers.{index}.ssm_conv"
        self.shape, self.eps = shape, eps
        width, heads = shape.width, shape.heads
        self.inputs = take_biased(
            weights,
            place,
            f"{prefix}.in_proj",
            (width + shape.channels + heads, hidden),
            shape.biased,
            before=shape.before_scale,
            each=shape.in_scale,
        )
        out_biased = shape.biased if shape.out_biased is None else shape.out_biased
        self.output = take_biased(
            weights, place, f"{prefix}.out_proj", (hidden, width), out_biased, behind=shape.out_scale
        )
        self.conv, self.conv_bias = take_conv(
            weights, place, f"{prefix}.conv1d", shape.channels, shape.kernel, shape.conv_biased
        )
        self.step_bias = place(weights.take(f"{prefix}.dt_bias", (heads,)), torch.float32)
        self.rate = place(-weights.take(f"{prefix}.A_log", (heads,)).float().exp(), torch.float32)
        self.skip = place(weights.take(f"{prefix}.D", (heads,)), torch.float32)
        self.norm = None if shape.gated_norm is None else take_norm(weights, place, f"{prefix}.norm.weight", width)

    def arrays(self, dtype: torch.dtype) -> Arrays:
        shape = self.shape
        return Arrays(
            snapshot=[
                ArraySpec(self.recurrent_name, (shape.heads, shape.states, shape.head_dim), torch.float32),
                ArraySpec(self.conv_name, (shape.kernel - 1, shape.channels), dtype),
            ]
        )

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turns: Turns) -> torch.Tensor:
        shape, tokens = self.shape, len(x)
        width, grouped = shape.width, shape.groups * shape.states
        gate, mixed, step = torch.split(self.inputs(x), [width, shape.channels, shape.heads], 1)
        sequences = batch.live_sequences(pool)
        tail = pool.live_views[self.conv_name]
        mixed = causal_conv(mixed, self.conv, self.conv_bias, tail, sequences, silu=True)
        values, b, c = torch.split(mixed, [width, grouped, grouped], 1)
        values = values.reshape(tokens, shape.heads, shape.head_dim)
        step = F.softplus(step.float() + self.step_bias).clamp(*shape.limit)
        out = outer_recurrence(
            c.view(tokens, shape.groups, shape.states),
            b.view(tokens, shape.groups, shape.states),
            values * step[..., None],
            torch.exp(step * self.rate),
            None,
            pool.live_views[self.recurrent_name],
            sequences,
        )
        y = (out + values * self.skip[:, None]).flatten(1)
        return self.output(self._gated(y, gate).to(x.dtype))

    def _gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        opened = F.silu(gate.float())
        if self.norm is None:
            return y * opened
        if self.shape.gated_norm == "gate first":
            y = y * opened
        grouped = y.view(len(y), self.shape.groups, -1)
        y = F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).view_as(y) * self.norm
        return y if self.shape.gated_norm == "gate first" else y * opened


@dataclass(frozen=True, slots=True)
class Mamba1Shape:
    """The sizes of a Mamba-1 layer. rank: of its steps' projection. norms: what steps, B and C are normed with: the
    names of their weights, or () for norms that have none; None for no norms."""

    width: int
    states: int
    kernel: int
    rank: int
    biased: bool
    conv_biased: bool
    norms: tuple[str, ...] | None
    eps: float

    def __post_init__(self) -> None:
        if self.kernel < 2:
            raise ModelError(f"config.json has a convolution over {self.kernel} tokens; it must be 2 or more.")


class Mamba1:
    """Snapshot state: some numbers of each channel, and the convolution's last inputs.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023).
    """

    def __init__(
        self, index: int, prefix: str, hidden: int, shape: Mamba1Shape, weights: Weights, place: Place
    ) -> None:
        self.recurrent_name, self.conv_name = f"layers.{index}.recurrent", f"layers.{index}.conv"
        self.shape = shape
        width, states, rank = shape.width, shape.states, shape.rank
        self.inputs = take_biased(weights, place, f"{prefix}.in_proj", (2 * width, hidden), shape.biased)
        self.output = take_biased(weights, place, f"{prefix}.out_proj", (hidden, width), shape.biased)
        self.conv, self.conv_bias = take_conv(
            weights, place, f"{prefix}.conv1d", width, shape.kernel, shape.conv_biased
        )
        self.parameters = Linear(place(weights.take(f"{prefix}.x_proj.weight", (rank + 2 * states, width))))
        self.steps = Linear(place(weights.take(f"{prefix}.dt_proj.weight", (width, rank))))
        self.step_bias = place(weights.take(f"{prefix}.dt_proj.bias", (width,)), torch.float32)
        self.rates = place(-weights.take(f"{prefix}.A_log", (width, states)).float().exp().t(), torch.float32)
        self.skip = place(weights.take(f"{prefix}.D", (width,)), torch.float32)
        sizes = (rank, states, states)
        self.norms: list[torch.Tensor] | None = None
        if shape.norms:
            named = zip(shape.norms, sizes, strict=True)
            self.norms = [take_norm(weights, place, f"{prefix}.{name}.weight", size) for name, size in named]
        elif shape.norms is not None:
            self.norms = [place(torch.ones(size), torch.float32) for size in sizes]

    def arrays(self, dtype: torch.dtype) -> Arrays:
        shape = self.shape
        return Arrays(
            snapshot=[
                ArraySpec(self.recurrent_name, (shape.states, shape.width), torch.float32),
                ArraySpec(self.conv_name, (shape.kernel - 1, shape.width), dtype),
            ]
        )

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turns: Turns) -> torch.Tensor:
        shape = self.shape
        mixed, gate = self.inputs(x).chunk(2, dim=1)
        sequences = batch.live_sequences(pool)
        tail = pool.live_views[self.conv_name]
        mixed = causal_conv(mixed, self.conv, self.conv_bias, tail, sequences, silu=True)
        parameters = torch.split(self.parameters(mixed.to(x.dtype)), [shape.rank, shape.states, shape.states], 1)
        if self.norms is not None:
            named = zip(parameters, self.norms, strict=True)
            parameters = tuple(rms_norm(each.contiguous(), norm, shape.eps) for each, norm in named)
        low, b, c = parameters
        step = F.softplus(self.steps(low).float() + self.step_bias)
        state = pool.live_views[self.recurrent_name]
        out = selective_scan(mixed, step, self.rates, b.float(), c.float(), state, sequences)
        y = (out + mixed * self.skip) * F.silu(gate.float())
        return self.output(y.to(x.dtype))

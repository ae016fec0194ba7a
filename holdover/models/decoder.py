"""What all decoders have in common: embedding, branches off a residual stream, norms, and the head."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from holdover.models.base import Batch
from holdover.models.loader import Weights
from holdover.models.rotary import Rotary, Turn
from holdover.ops.experts import FeedForward
from holdover.ops.linear import Linear
from holdover.ops.norm import rms_norm
from holdover.state.layout import LAST_HIDDEN, ArraySpec, Layout
from holdover.state.pool import DevicePool

Turns = Mapping[str, Turn]  # by the name that a layer knows its rotary positions by


@dataclass(frozen=True, slots=True)
class Arrays:
    """The state of one layer. window: how many tokens before the newest one its window rows are of use to."""

    token: list[ArraySpec] = field(default_factory=list)
    snapshot: list[ArraySpec] = field(default_factory=list)
    rows_in_window: list[ArraySpec] = field(default_factory=list)
    window: int = 0


@runtime_checkable
class Mixer(Protocol):
    """A part of a layer in which tokens meet: the only kind with state."""

    def arrays(self, dtype: torch.dtype) -> Arrays:
        """What state it keeps."""

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turns: Turns) -> torch.Tensor:
        """x: normed, [tokens, hidden], not to be written to. Returns what is added to the residual stream."""


class Place(Protocol):
    """Puts a weight where and as it is used; in the model's dtype unless another is given."""

    def __call__(self, tensor: torch.Tensor, kind: torch.dtype = ...) -> torch.Tensor: ...


Part = Mixer | Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Branch:
    """x <- x + scale out_norm(part(norm(x))). Norms: float32 [hidden], where there are any."""

    norm: torch.Tensor | None
    part: Part
    out_norm: torch.Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Names:
    """What a checkpoint calls the weights that are of no layer."""

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"


MakeLayer = Callable[[int, Weights, Place], Sequence[Branch]]


class Decoder:
    """A causal language model with weights. config: normalised; what it says goes into the fingerprint.

    rotaries: rotary positions by the name that layers ask for them by. unit_offset: the last norm's weight is kept less
    one. residual_dtype: of the residual stream, where it is not the model's.
    """

    def __init__(
        self,
        config: dict[str, Any],
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        make_layer: MakeLayer,
        *,
        context_length: int,
        rotaries: Mapping[str, Rotary] | None = None,
        names: Names | None = None,
        unit_offset: bool = False,
        embedding_scale: float = 1.0,
        logits_scale: float = 1.0,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        names = names or Names()
        self.vocab_size: int = config["vocab_size"]
        self.context_length = context_length
        self.device = device
        eos = config.get("eos_token_id")
        self.eos_token_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.eps: float = config["rms_norm_eps"]
        self.embedding_scale, self.logits_scale = embedding_scale, logits_scale
        self.dtype, self.residual_dtype = dtype, residual_dtype or dtype
        hidden = config["hidden_size"]

        def place(tensor: torch.Tensor, kind: torch.dtype = dtype) -> torch.Tensor:
            return tensor.to(device=device, dtype=kind).contiguous()

        self.embedding = place(weights.take(names.embedding, (self.vocab_size, hidden)))
        layers = range(config["num_hidden_layers"])
        self.branches = [branch for index in layers for branch in make_layer(index, weights, place)]
        self.norm = take_norm(weights, place, names.norm, hidden, unit_offset)
        tied = bool(config.get("tie_word_embeddings"))
        if tied and weights.has(names.head):  # some checkpoints carry the tied copy
            weights.take(names.head, (self.vocab_size, hidden))
        self.head = Linear(self.embedding if tied else place(weights.take(names.head, (self.vocab_size, hidden))))
        weights.check_all_taken()
        self.rotaries = {name: rotary.placed(dtype, device) for name, rotary in (rotaries or {}).items()}
        arrays = [each.part.arrays(dtype) for each in self.branches if isinstance(each.part, Mixer)]
        self.layout = Layout(
            token_arrays=tuple(spec for each in arrays for spec in each.token),
            snapshot_arrays=(
                *(spec for each in arrays for spec in each.snapshot),
                ArraySpec(LAST_HIDDEN, (hidden,), dtype),
            ),
            window_arrays=tuple(spec for each in arrays for spec in each.rows_in_window),
            window=max((each.window for each in arrays), default=0),
        )
        self.fingerprint = self.layout.fingerprint(weights.digest(), config)

    def forward(self, batch: Batch, pool: DevicePool) -> torch.Tensor:
        x = F.embedding(batch.token_ids, self.embedding).to(self.residual_dtype)
        if self.embedding_scale != 1.0:
            x *= self.embedding_scale
        turns = {name: rotary.at(batch.positions) for name, rotary in self.rotaries.items()}
        delta = None
        for branch in self.branches:
            normed = self._normed(x, branch.norm, delta)
            if isinstance(branch.part, Mixer):
                delta = branch.part.forward(normed, batch, pool, turns)
            else:
                delta = branch.part(normed)
            if branch.out_norm is not None:
                delta = rms_norm(delta, branch.out_norm, self.eps)
            if branch.scale != 1.0:
                delta = delta * branch.scale
        return self._normed(x, self.norm, delta)

    def _normed(self, x: torch.Tensor, norm: torch.Tensor | None, delta: torch.Tensor | None) -> torch.Tensor:
        """The residual stream with `delta` added to it, in place, normed."""
        if norm is not None and x.dtype == self.dtype:
            return rms_norm(x, norm, self.eps, delta)
        if delta is not None:
            x += delta
        entering = x.to(self.dtype)
        return entering if norm is None else rms_norm(entering, norm, self.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.head(hidden).float()
        return scores if self.logits_scale == 1.0 else scores * self.logits_scale


def take_norm(weights: Weights, place: Place, name: str, size: int, unit_offset: bool = False) -> torch.Tensor:
    """The weight of a norm, float32 [size]. unit_offset: the checkpoint has it less one."""
    weight = weights.take(name, (size,)).float()
    return place(weight + 1.0 if unit_offset else weight, torch.float32)


def pre_normed(
    config: dict[str, Any],
    index: int,
    weights: Weights,
    place: Place,
    mixer: Part,
    feed_forward: Part,
    *,
    names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    unit_offset: bool = False,
    scale: float = 1.0,
) -> tuple[Branch, Branch]:
    """The layer of most decoders: a mixer and a feed-forward part, with a norm before each."""
    norms = (
        take_norm(weights, place, f"model.layers.{index}.{name}.weight", config["hidden_size"], unit_offset)
        for name in names
    )
    first, second = norms
    return Branch(first, mixer, scale=scale), Branch(second, feed_forward, scale=scale)


def feed_forward(
    weights: Weights,
    place: Place,
    prefixes: tuple[str, ...],
    hidden: int,
    inner: int,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    gate_scale: float = 1.0,
    scale: float = 1.0,
) -> FeedForward:
    """A SwiGLU layer, under the first of `prefixes` that the checkpoint has. Scales go into the weights."""

    def take(part: str, shape: tuple[int, ...]) -> torch.Tensor:
        first, *others = (f"{prefix}.{part}.weight" for prefix in prefixes)
        return weights.take(first, shape, aliases=tuple(others))

    gate, up, down = names
    gate_up = torch.cat([scaled(take(gate, (inner, hidden)), gate_scale), take(up, (inner, hidden))])
    return FeedForward(place(gate_up), place(scaled(take(down, (hidden, inner)), scale)))


def scaled(weight: torch.Tensor, scale: float) -> torch.Tensor:
    """A weight that does what the weight and a constant factor behind it do."""
    return weight if scale == 1.0 else (weight.float() * scale).to(weight.dtype)

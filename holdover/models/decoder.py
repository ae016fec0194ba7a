"""What all decoders have in common: embedding, layers of a mixer and a feed-forward part, norms, and the head."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from holdover.models.base import Batch
from holdover.models.loader import Weights
from holdover.models.rotary import Rotary
from holdover.ops.experts import FeedForward
from holdover.ops.linear import Linear
from holdover.ops.norm import rms_norm
from holdover.state.layout import LAST_HIDDEN, ArraySpec, Layout
from holdover.state.pool import DevicePool

Turn = tuple[torch.Tensor, torch.Tensor] | None  # cosines and sines of the batch's tokens, [tokens, head_dim] each


@dataclass(frozen=True, slots=True)
class Arrays:
    """The state of one layer. window: how many tokens before the newest one its window rows are of use to."""

    token: list[ArraySpec] = field(default_factory=list)
    snapshot: list[ArraySpec] = field(default_factory=list)
    rows_in_window: list[ArraySpec] = field(default_factory=list)
    window: int = 0


class Mixer(Protocol):
    """The part of a layer in which tokens meet, and the only one with state."""

    def arrays(self, dtype: torch.dtype) -> Arrays:
        """What state it keeps."""

    def forward(self, x: torch.Tensor, batch: Batch, pool: DevicePool, turn: Turn) -> torch.Tensor:
        """x: normed, [tokens, hidden]. Returns what is added to the residual stream."""


class Place(Protocol):
    """Puts a weight where and as it is used; in the model's dtype unless another is given."""

    def __call__(self, tensor: torch.Tensor, kind: torch.dtype = ...) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Norms: float32 [hidden]."""

    input_norm: torch.Tensor
    mixer: Mixer
    post_norm: torch.Tensor
    feed_forward: Callable[[torch.Tensor], torch.Tensor]


MakeLayer = Callable[[int, Weights, Place], Layer]


class Decoder:
    """A causal language model with weights. config: normalised; what it says goes into the fingerprint."""

    def __init__(
        self,
        config: dict[str, Any],
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        make_layer: MakeLayer,
        *,
        context_length: int,
        rotary: bool,
    ) -> None:
        self.vocab_size: int = config["vocab_size"]
        self.context_length = context_length
        self.device = device
        eos = config.get("eos_token_id")
        self.eos_token_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.eps: float = config["rms_norm_eps"]
        hidden = config["hidden_size"]

        def place(tensor: torch.Tensor, kind: torch.dtype = dtype) -> torch.Tensor:
            return tensor.to(device=device, dtype=kind).contiguous()

        self.embedding = place(weights.take("model.embed_tokens.weight", (self.vocab_size, hidden)))
        self.layers = [make_layer(index, weights, place) for index in range(config["num_hidden_layers"])]
        self.norm = place(weights.take("model.norm.weight", (hidden,)), torch.float32)
        tied = bool(config.get("tie_word_embeddings"))
        if tied and weights.has("lm_head.weight"):  # some checkpoints carry the tied copy
            weights.take("lm_head.weight", (self.vocab_size, hidden))
        self.head = Linear(self.embedding if tied else place(weights.take("lm_head.weight", (self.vocab_size, hidden))))
        weights.check_all_taken()
        self.rotary = Rotary(config, context_length, dtype, device) if rotary else None
        arrays = [layer.mixer.arrays(dtype) for layer in self.layers]
        self.layout = Layout(
            token_arrays=tuple(spec for each in arrays for spec in each.token),
            snapshot_arrays=(
                *(spec for each in arrays for spec in each.snapshot),
                ArraySpec(LAST_HIDDEN, (hidden,), dtype),
            ),
            window_arrays=tuple(spec for each in arrays for spec in each.rows_in_window),
            window=max(each.window for each in arrays),
        )
        self.fingerprint = self.layout.fingerprint(weights.digest(), config)

    def forward(self, batch: Batch, pool: DevicePool) -> torch.Tensor:
        x = F.embedding(batch.token_ids, self.embedding)
        turn = None if self.rotary is None else self.rotary.at(batch.positions)
        delta = None
        for layer in self.layers:
            delta = layer.mixer.forward(rms_norm(x, layer.input_norm, self.eps, delta), batch, pool, turn)
            delta = layer.feed_forward(rms_norm(x, layer.post_norm, self.eps, delta))
        return rms_norm(x, self.norm, self.eps, delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).float()


def layer_norms(config: dict[str, Any], index: int, weights: Weights, place: Place) -> tuple[torch.Tensor, ...]:
    """The two norms of a layer as most checkpoints name them: before the mixer, and before the feed-forward part."""
    shape = (config["hidden_size"],)
    names = ("input_layernorm", "post_attention_layernorm")
    return tuple(place(weights.take(f"model.layers.{index}.{name}.weight", shape), torch.float32) for name in names)


def feed_forward(weights: Weights, place: Place, prefixes: tuple[str, ...], hidden: int, inner: int) -> FeedForward:
    """A SwiGLU layer, under the first of `prefixes` that the checkpoint has."""

    def take(part: str, shape: tuple[int, ...]) -> torch.Tensor:
        first, *others = (f"{prefix}.{part}.weight" for prefix in prefixes)
        return weights.take(first, shape, aliases=tuple(others))

    gate_up = torch.cat([take("gate_proj", (inner, hidden)), take("up_proj", (inner, hidden))])
    return FeedForward(place(gate_up), place(take("down_proj", (hidden, inner))))

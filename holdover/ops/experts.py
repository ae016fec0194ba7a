"""Mixture of experts: routing, and the experts' feed-forward layers over tokens sorted by expert."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from holdover.ops import native
from holdover.ops.linear import Linear, pack, packs, product, product_threads
from holdover.ops.norm import threads_for
from holdover.ops.shapes import padded_length, pads_shapes, widens


def route_sigmoid(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by sigmoid scores with a correction bias. x: [tokens, hidden]; router: float32 [experts, hidden];
    bias: float32 [experts].

    Returns (weights float32 [tokens, top_k], experts int64 [tokens, top_k]).
    Source: DeepSeek-AI, "DeepSeek-V3" (2024), section 2.1.2.
    """
    plain = num_groups == 1 and x.device.type == "cpu" and x.is_contiguous()
    if plain and (library := native.library()) is not None:
        weights = torch.empty(len(x), top_k, dtype=torch.float32)
        experts = torch.empty(len(x), top_k, dtype=torch.int64)
        library.holdover_route(
            ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(router.data_ptr()), ctypes.c_void_p(bias.data_ptr()),
            ctypes.c_void_p(weights.data_ptr()), ctypes.c_void_p(experts.data_ptr()), ctypes.c_int64(len(x)),
            x.shape[1], len(router), top_k, int(renormalize), ctypes.c_float(scaling),
            int(x.dtype == torch.bfloat16), threads_for(x.numel()),
        )  # fmt: skip
        return weights, experts
    scores = F.linear(x.float(), router).sigmoid()
    choice = scores + bias
    if num_groups > 1:
        grouped = choice.view(len(choice), num_groups, -1)
        best = grouped.topk(2, dim=-1)[0].sum(-1).topk(top_groups, dim=-1)[1]
        allowed = torch.zeros(len(choice), num_groups, dtype=torch.bool, device=x.device).scatter_(1, best, True)
        choice = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    experts = choice.topk(top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, experts


def route_softmax(
    x: torch.Tensor, router: torch.Tensor, *, top_k: int, renormalize: bool, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by softmax scores. x: [tokens, hidden]; router: [experts, hidden], bias: [experts], in x's dtype.

    Returns (weights float32 [tokens, top_k], experts int64 [tokens, top_k]).
    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017); Qwen Team, "Qwen3" (2025).
    """
    scores = torch.softmax(F.linear(x, router, bias).float(), dim=-1)
    weights, experts = scores.topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(x.dtype).float(), experts


class FeedForward:
    """SwiGLU: down(silu(gate(x)) * up(x)). gate_up: [2 * inner, hidden], gate first; down: [hidden, inner]."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._packed = _Packed.of(gate_up[None], down[None])
        self._linear = (Linear(gate_up), Linear(down)) if self._packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]. Returns [tokens, hidden]."""
        if self._packed is not None:
            return self._packed(x)
        assert self._linear is not None
        gate_up, down = self._linear
        return down(gated_silu(gate_up(x)))


class ExpertFeedForward:
    """A feed-forward layer for each expert: down(activation(up(x))). up: [experts, up_width, hidden]; down: [experts,
    hidden, inner]. activation: [rows, up_width] to [rows, inner]; without one it is SwiGLU's, gates first, and up_width
    is 2 * inner. biases: [experts, up_width] and [experts, hidden].
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.num_experts = len(gate_up)
        self._activation, self._biases = activation or gated_silu, biases or (None, None)
        self._packed = _Packed.of(gate_up, down) if activation is None and biases is None else None
        self._weights = None
        if self._packed is None:
            if widens(gate_up):
                self._weights = gate_up.contiguous(), down.contiguous()
            else:
                self._weights = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, shared: torch.Tensor
    ) -> torch.Tensor:
        """Each token through its experts, weighted and summed, on top of what the shared expert gave.

        x, shared: [tokens, hidden]; weights: float32 [tokens, top_k]; experts: int64 [tokens, top_k].
        Returns [tokens, hidden].
        """
        if self._packed is not None:
            return self._packed(x, weights, experts, shared)
        assert self._weights is not None
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts).tolist()
        pads = pads_shapes(x)
        rooms = [padded_length(count) if count else 0 for count in counts] if pads else counts
        starts = list(accumulate(rooms, initial=0))
        library = native.library() if x.device.type == "cpu" and x.is_contiguous() else None
        rows, place = _dispatch(x, experts, counts, starts, library)
        gate_up, down = self._weights
        inner = self._activation(_by_expert(rows, gate_up, starts, self._biases[0]))
        return _combine(_by_expert(inner, down, starts, self._biases[1]), place, weights, shared, library)


def _by_expert(
    rows: torch.Tensor, weights: torch.Tensor, starts: list[int], biases: torch.Tensor | None
) -> torch.Tensor:
    """Rows `[starts[e], starts[e + 1])` by expert e's weight. weights: [experts, in_features, out_features], or the
    last two the other way round if products are widened; biases: [experts, out_features]."""
    wide = widens(rows)
    out = torch.empty(len(rows), weights.shape[1 if wide else 2], dtype=rows.dtype, device=rows.device)
    for expert, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        if last > first:
            if wide:
                out[first:last] = product(rows[first:last], weights[expert])
            else:
                torch.mm(rows[first:last], weights[expert], out=out[first:last])
            if biases is not None:
                out[first:last] += biases[expert]
    return out


@dataclass(frozen=True, slots=True)
class _Packed:
    """The weights of one or more layers, packed for the matrix unit; gates and what they gate lie side by side."""

    gate_up: torch.Tensor
    down: torch.Tensor
    num_experts: int
    hidden: int
    inner: int

    @classmethod
    def of(cls, gate_up: torch.Tensor, down: torch.Tensor) -> "_Packed | None":
        """None where the machine has no matrix unit, or sizes don't fit it."""
        num_experts, hidden, inner = down.shape
        if not packs(gate_up) or not packs(down):
            return None
        tiles = gate_up.view(num_experts, 2, inner // 16, 16, hidden).transpose(1, 2)
        side_by_side = tiles.reshape(num_experts, 2 * inner, hidden)
        return cls(
            torch.cat([pack(each) for each in side_by_side]),
            torch.cat([pack(each) for each in down]),
            num_experts,
            hidden,
            inner,
        )

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor | None = None,
        experts: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ExpertFeedForward; without experts, all tokens through the only layer."""
        library = native.library()
        assert library is not None
        x = x.contiguous()
        out = torch.empty_like(x)
        top_k = 1 if experts is None else experts.shape[1]
        given = [None if each is None else each.contiguous() for each in (experts, weights, shared)]
        pointers = [ctypes.c_void_p(None if each is None else each.data_ptr()) for each in given]
        status = library.holdover_feed_forward(
            ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(len(x)), ctypes.c_int64(self.hidden),
            ctypes.c_int64(self.inner), ctypes.c_void_p(self.gate_up.data_ptr()),
            ctypes.c_void_p(self.down.data_ptr()), self.num_experts, pointers[0], pointers[1], top_k, pointers[2],
            ctypes.c_void_p(out.data_ptr()), product_threads(len(x) * top_k * self.hidden * self.inner),
        )  # fmt: skip
        if status != 0:
            raise MemoryError(f"a feed-forward layer over {tuple(x.shape)} failed (status {status})")
        return out


def gated_silu(inner: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. inner: [tokens, 2 * dim], gate first. Returns [tokens, dim]."""
    tokens, width = inner.shape
    library = native.library() if inner.device.type == "cpu" and inner.is_contiguous() else None
    if library is None:
        gate, up = inner.chunk(2, dim=-1)
        return F.silu(gate) * up
    out = torch.empty(tokens, width // 2, dtype=inner.dtype)
    library.holdover_gated_silu(
        ctypes.c_void_p(inner.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(tokens), width // 2,
        int(inner.dtype == torch.bfloat16), threads_for(inner.numel()),
    )  # fmt: skip
    return out


def _dispatch(
    x: torch.Tensor, experts: torch.Tensor, counts: list[int], starts: list[int], library: ctypes.CDLL | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x sorted by expert, e's from `starts[e]` on, and the row of each choice, int64 [tokens * top_k]."""
    num_tokens, top_k = experts.shape
    if library is not None:
        rows = torch.empty(starts[-1], x.shape[1], dtype=x.dtype)
        place = torch.empty(num_tokens * top_k, dtype=torch.int64)
        edges = (ctypes.c_int64 * len(starts))(*starts)
        experts = experts.contiguous()
        library.holdover_dispatch(
            ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(experts.data_ptr()), edges, ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(place.data_ptr()), ctypes.c_int64(num_tokens), top_k, len(counts),
            ctypes.c_int64(x.shape[1] * x.itemsize), threads_for(rows.numel()),
        )  # fmt: skip
        return rows, place
    order = experts.flatten().argsort(stable=True)
    behind = torch.tensor(starts[:-1]) - torch.tensor(list(accumulate(counts, initial=0))[:-1])
    sorted_place = torch.arange(num_tokens * top_k) + torch.repeat_interleave(behind, torch.tensor(counts))
    rows = torch.zeros(starts[-1], x.shape[1], dtype=x.dtype, device=x.device)
    sorted_place = sorted_place.to(x.device)
    rows[sorted_place] = x.index_select(0, order // top_k)
    place = torch.empty_like(sorted_place)
    place[order] = sorted_place
    return rows, place


def _combine(
    rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor, library: ctypes.CDLL | None
) -> torch.Tensor:
    num_tokens, top_k = weights.shape
    if library is not None:
        out = torch.empty_like(shared)
        weights = weights.contiguous()
        library.holdover_combine(
            ctypes.c_void_p(rows.data_ptr()), ctypes.c_void_p(place.data_ptr()), ctypes.c_void_p(weights.data_ptr()),
            ctypes.c_void_p(shared.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(num_tokens), top_k,
            rows.shape[1], int(rows.dtype == torch.bfloat16), threads_for(rows.numel()),
        )  # fmt: skip
        return out
    chosen = rows.index_select(0, place).view(num_tokens, top_k, -1)
    return (shared.float() + torch.einsum("tk,tkh->th", weights, chosen.float())).to(shared.dtype)

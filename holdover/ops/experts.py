"""Mixture of experts: routing, and the experts' feed-forward layers over tokens sorted by expert."""

import ctypes
from itertools import accumulate

import torch
import torch.nn.functional as F

from holdover.ops import native
from holdover.ops.linear import ExpertLinear, Linear
from holdover.ops.norm import threads_for


def route_sigmoid(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by sigmoid scores with a correction bias. logits: float32 [tokens, experts]; bias: [experts].

    Returns (weights float32 [tokens, top_k], experts int64 [tokens, top_k]).
    Source: DeepSeek-AI, "DeepSeek-V3" (2024), section 2.1.2.
    """
    scores = logits.sigmoid()
    choice = scores + bias
    if num_groups > 1:
        grouped = choice.view(len(choice), num_groups, -1)
        best = grouped.topk(2, dim=-1)[0].sum(-1).topk(top_groups, dim=-1)[1]
        allowed = torch.zeros(len(choice), num_groups, dtype=torch.bool, device=logits.device).scatter_(1, best, True)
        choice = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    experts = choice.topk(top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, experts


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


def gated_feed_forward(x: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
    """SwiGLU. x: [tokens, hidden]; gate_up: hidden to 2 * intermediate, gate first; down: intermediate to hidden."""
    return down(gated_silu(gate_up(x)))


def experts_feed_forward(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    shared: torch.Tensor,
) -> torch.Tensor:
    """Each token through its experts, weighted and summed, on top of what the shared expert gave.

    x, shared: [tokens, hidden]; weights: float32 [tokens, top_k]; experts: int64 [tokens, top_k]; gate_up, down: as in
    `gated_feed_forward`, one for each expert. Returns [tokens, hidden].
    """
    counts = torch.bincount(experts.flatten(), minlength=gate_up.num_experts).tolist()
    starts = list(accumulate(gate_up.rooms(counts), initial=0))
    library = native.library() if x.device.type == "cpu" and x.is_contiguous() else None
    rows, place = _dispatch(x, experts, counts, starts, library)
    return _combine(down(gated_silu(gate_up(rows, starts)), starts), place, weights, shared, library)


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

"""Mixture of experts: routing, and the experts' feed-forward layers over tokens sorted by expert."""

from itertools import accumulate

import torch
import torch.nn.functional as F

from holdover.ops.shapes import padded_length, pads_shapes


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


def gated_feed_forward(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """SwiGLU. x: [tokens, hidden]; gate_up: [2 * intermediate, hidden]; down: [hidden, intermediate]."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def experts_feed_forward(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Each token through its experts, weighted and summed.

    x: [tokens, hidden]; weights, experts: [tokens, top_k]; gate_up: [experts, hidden, 2 * intermediate];
    down: [experts, intermediate, hidden]. Returns [tokens, hidden].
    """
    num_tokens, top_k = experts.shape
    num_experts, _, width = gate_up.shape
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=num_experts).tolist()
    room = [padded_length(count) if count else 0 for count in counts] if pads_shapes(x) else counts
    starts = list(accumulate(room, initial=0))
    # Place of each sorted choice: behind those of the experts before, whose room may be longer than their count.
    shift = [start - before for start, before in zip(starts, accumulate(counts, initial=0), strict=True)]
    place = torch.arange(len(chosen), device=x.device)
    if room != counts:
        place += torch.repeat_interleave(torch.tensor(shift[:-1]), torch.tensor(counts))
    rows = torch.zeros(starts[-1], x.shape[1], dtype=x.dtype, device=x.device)
    rows[place] = x.index_select(0, order // top_k)
    inner = torch.empty(len(rows), width, dtype=x.dtype, device=x.device)
    spans = [(expert, start, start + size) for expert, (start, size) in enumerate(zip(starts, room, strict=False)) if size]
    for expert, first, last in spans:
        torch.mm(rows[first:last], gate_up[expert], out=inner[first:last])
    gate, up = inner.chunk(2, dim=-1)
    activated = F.silu(gate).mul_(up)
    for expert, first, last in spans:
        torch.mm(activated[first:last], down[expert], out=rows[first:last])
    by_choice = torch.empty(len(chosen), x.shape[1], dtype=x.dtype, device=x.device)
    by_choice[order] = rows.index_select(0, place)
    return torch.bmm(weights.to(x.dtype).unsqueeze(1), by_choice.view(num_tokens, top_k, -1)).squeeze(1)

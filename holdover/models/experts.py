"""Mixtures of experts as checkpoints have them: routers, experts, and what all tokens share."""

from collections.abc import Callable
from typing import Any

import torch

from holdover.models.decoder import Place
from holdover.models.loader import Weights
from holdover.ops.experts import ExpertFeedForward, route_sigmoid, route_softmax

Layer = Callable[[torch.Tensor], torch.Tensor]
GATED = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")


def stacked_experts(
    weights: Weights,
    place: Place,
    prefix: str,
    count: int,
    hidden: int,
    inner: int,
    names: tuple[str, str, str] = GATED,
) -> ExpertFeedForward:
    """The SwiGLU experts under `prefix`, each with weights of its own."""
    gate, up, down = names
    gate_up, downs = [], []
    for i in range(count):
        parts = [weights.take(f"{prefix}.{i}.{name}.weight", (inner, hidden)) for name in (gate, up)]
        gate_up.append(torch.cat(parts))
        downs.append(weights.take(f"{prefix}.{i}.{down}.weight", (hidden, inner)))
    return ExpertFeedForward(place(torch.stack(gate_up)), place(torch.stack(downs)))


class SoftmaxExperts:
    """Experts chosen by softmax scores, and what all tokens share. router: [experts, hidden], bias: [experts], both in
    the model's dtype; shared_gate: [1, hidden], a gate on what the shared layer gives."""

    def __init__(
        self,
        router: torch.Tensor,
        experts: ExpertFeedForward,
        *,
        top_k: int,
        renormalize: bool,
        bias: torch.Tensor | None = None,
        shared: Layer | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> None:
        self.router, self.bias, self.experts = router, bias, experts
        self.top_k, self.renormalize = top_k, renormalize
        self.shared, self.shared_gate = shared, shared_gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        chosen = route_softmax(x, self.router, top_k=self.top_k, renormalize=self.renormalize, bias=self.bias)
        shared = torch.zeros_like(x) if self.shared is None else self.shared(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(x @ self.shared_gate.t())
        return self.experts(x, *chosen, shared)


class SigmoidExperts:
    """Experts chosen by sigmoid scores with a correction bias, in groups, and what all tokens share: of DeepSeek-V3 and
    its kin. config: num_experts_per_tok, n_group, topk_group, norm_topk_prob, routed_scaling_factor. router: float32
    [experts, hidden]; bias: float32 [experts]. latent: what tokens go through before and after the experts.
    """

    def __init__(
        self,
        config: dict[str, Any],
        router: torch.Tensor,
        bias: torch.Tensor,
        experts: ExpertFeedForward,
        shared: Layer,
        latent: tuple[Layer, Layer] | None = None,
    ) -> None:
        self.router, self.bias, self.experts, self.shared, self.latent = router, bias, experts, shared, latent
        self.top_k: int = config["num_experts_per_tok"]
        self.num_groups: int = config["n_group"]
        self.top_groups: int = config["topk_group"]
        self.renormalize = bool(config["norm_topk_prob"])
        self.scaling: float = config["routed_scaling_factor"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        chosen = route_sigmoid(
            x, self.router, self.bias, top_k=self.top_k, num_groups=self.num_groups, top_groups=self.top_groups,
            renormalize=self.renormalize, scaling=self.scaling,
        )  # fmt: skip
        if self.latent is None:
            return self.experts(x, *chosen, self.shared(x))
        into, out_of = self.latent
        entering = into(x)
        return out_of(self.experts(entering, *chosen, torch.zeros_like(entering))) + self.shared(x)

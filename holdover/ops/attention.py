"""Attention of a batch of unlike sequences over rows that lie in slots."""

import torch
import torch.nn.functional as F


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
    """Which keys each of the last `num_queries` positions may see: bool [num_queries, num_keys]; None for all."""
    if num_queries == 1:
        return None
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask.tril(num_keys - num_queries)


def grouped_query_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of one sequence. q: [queries, heads, head_dim]; k, v: [keys, kv_heads, head_dim].

    Returns [queries, heads, head_dim]. mask: bool [queries, keys] or None.
    """
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def latent_attention(
    q: torch.Tensor, latents: torch.Tensor, latent_dim: int, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """Multi-head latent attention of one sequence in its absorbed form: all heads share the latents as keys and values.

    q: [queries, heads, latent_dim + rope_dim]; latents: [keys, latent_dim + rope_dim]. Returns [queries, heads,
    latent_dim]. Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.3.
    """
    queries, heads, width = q.shape
    scores = (q.reshape(queries * heads, width) @ latents.t()).float().mul_(scale)
    if mask is not None:
        scores.view(queries, heads, -1).masked_fill_(~mask[:, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(latents.dtype)
    return (weights @ latents[:, :latent_dim]).view(queries, heads, latent_dim)

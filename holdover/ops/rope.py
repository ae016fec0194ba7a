"""Rotary positions."""

import torch


def rope_table(
    positions: int, head_dim: int, theta: float, frequencies: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position: two float32 [positions, head_dim]. frequencies: float32 [head_dim / 2], if
    they are not the plain ones of `theta`.

    Source: Su et al., "RoFormer" (2021), in the half-rotated form of Llama.
    """
    if frequencies is None:
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x by its positions. x: [tokens, heads, head_dim]; cos, sin: [tokens, head_dim], in x's dtype."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

"""Rotary positions."""

import torch


def rope_table(
    positions: int, dim: int, theta: float, frequencies: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position: two float32 [positions, dim]. frequencies: float32 [dim / 2], if they are
    not the plain ones of `theta`.

    Source: Su et al., "RoFormer" (2021), in the half-rotated form of Llama.
    """
    if frequencies is None:
        frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first `dim` dimensions of each head by its position. x: [tokens, heads, head_dim]; cos, sin: [tokens,
    dim], in x's dtype or float32. Returns x's dtype."""
    dim = cos.shape[-1]
    half = dim // 2
    turned = torch.cat([-x[..., half:dim], x[..., :half]], dim=-1)
    y = (x[..., :dim] * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(x.dtype)
    return y if dim == x.shape[-1] else torch.cat([y, x[..., dim:]], dim=-1)

"""A checkpoint's rotary positions, from its configuration. Scaled forms are computed by Transformers' own functions."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from holdover.errors import ModelError
from holdover.ops.rope import rope_table

Turn = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of a batch's tokens, [tokens, rotary dimensions] each
# With "dynamic", frequencies change only past max_position_embeddings, and no longer prompt is served. With "longrope"
# they depend on whether a prompt is longer than the original context; here on whether prompts may be.
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def normalise_rope(config: dict[str, Any], *, partial: float | None = None) -> None:
    """Rotary settings in one form, `rope_parameters`, for the two that config.json comes in. partial: which share of a
    head is turned where config.json does not say; None where it is always all of it. Raises ModelError."""
    given = [config.pop(name, None) or {} for name in ("rope_scaling", "rope_parameters")]
    theta, factor = config.pop("rope_theta", None), config.pop("partial_rotary_factor", None)
    if not all(isinstance(each, dict) for each in given):
        raise ModelError(f"config.json has rope settings that are no object: {str(given)[:200]}.")
    config["rope_parameters"] = normal_rope({**given[0], **given[1]}, theta, factor, partial=partial)


def normal_rope(
    rope: dict[str, Any], theta: object = None, factor: object = None, *, partial: float | None = None
) -> dict[str, Any]:
    """One set of rotary settings in the one form. Raises ModelError."""
    rope = dict(rope)
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    theta = rope.get("rope_theta") or theta or 10_000.0
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ModelError(f"config.json has rope_theta = {str(theta)[:40]!r}; it must be a positive number.")
    rope["rope_theta"] = float(theta)
    if rope["rope_type"] not in ROPE_TYPES:
        raise ModelError(
            f"config.json has rope_type = {str(rope['rope_type'])[:40]!r}; these are served: {', '.join(ROPE_TYPES)}."
        )
    factor = rope.get("partial_rotary_factor", factor)
    if partial is None:
        if factor not in (None, 1):
            raise ModelError("config.json has a partial_rotary_factor, which is not implemented for this model type.")
        rope.pop("partial_rotary_factor", None)
        return rope
    factor = partial if factor is None else factor
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise ModelError(f"config.json has partial_rotary_factor = {str(factor)[:40]!r}; it must be above 0, up to 1.")
    rope["partial_rotary_factor"] = float(factor)
    return rope


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosines and sines of all positions: [positions, rotary dimensions] each."""

    cos: torch.Tensor
    sin: torch.Tensor
    exact: bool = False  # kept in float32, whatever the model's dtype

    @classmethod
    def of(
        cls, rope: dict[str, Any], config: dict[str, Any], positions: int, head_dim: int, *, exact: bool = False
    ) -> "Rotary":
        """From settings as `normal_rope` gives them. Raises ModelError."""
        dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        if dim <= 0 or dim % 2:
            raise ModelError(f"config.json has {dim} rotary dimensions a head; that must be a positive even number.")
        frequencies, scale = None, 1.0
        if rope["rope_type"] not in ("default", "dynamic"):
            settings: dict[str, Any] = {
                "rope_parameters": dict(rope), "head_dim": head_dim, "hidden_size": config["hidden_size"],
                "num_attention_heads": config["num_attention_heads"], "max_position_embeddings": positions,
            }  # fmt: skip
            try:
                whole = PreTrainedConfig(**settings)
                frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](whole, None, positions)
            except (KeyError, TypeError, ValueError) as error:
                raise ModelError(f"config.json has rope settings that can't be used ({error}): {rope}.") from None
        cos, sin = rope_table(positions, dim, rope["rope_theta"], frequencies)
        return cls(cos * scale, sin * scale, exact)

    def placed(self, dtype: torch.dtype, device: torch.device) -> "Rotary":
        """The same where and as it is used."""
        kind = torch.float32 if self.exact else dtype
        return Rotary(self.cos.to(device=device, dtype=kind), self.sin.to(device=device, dtype=kind), self.exact)

    def at(self, positions: torch.Tensor) -> Turn:
        """Of the tokens of a batch. positions: int64 [tokens]."""
        return self.cos[positions], self.sin[positions]

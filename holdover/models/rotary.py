"""A checkpoint's rotary positions, from its configuration. Scaled forms are computed by Transformers' own functions."""

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from holdover.errors import ModelError
from holdover.ops.rope import rope_table

# With "dynamic", frequencies change only past max_position_embeddings, and no longer prompt is served. With "longrope"
# they depend on whether a prompt is longer than the original context; here on whether prompts may be.
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def normalise_rope(config: dict[str, Any]) -> None:
    """Rotary settings in one form, `rope_parameters`, for the two that config.json comes in. Raises ModelError."""
    given = [config.pop(name, None) or {} for name in ("rope_scaling", "rope_parameters")]
    theta = config.pop("rope_theta", None)
    if not all(isinstance(each, dict) for each in given):
        raise ModelError(f"config.json has rope settings that are no object: {str(given)[:200]}.")
    rope: dict[str, Any] = {**given[0], **given[1]}
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    theta = rope.get("rope_theta") or theta or 10_000.0
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ModelError(f"config.json has rope_theta = {str(theta)[:40]!r}; it must be a positive number.")
    rope["rope_theta"] = float(theta)
    if rope["rope_type"] not in ROPE_TYPES:
        raise ModelError(
            f"config.json has rope_type = {str(rope['rope_type'])[:40]!r}; these are served: {', '.join(ROPE_TYPES)}."
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ModelError("config.json has a partial_rotary_factor, which is not implemented for this model type.")
    config["rope_parameters"] = rope


class Rotary:
    """Cosines and sines of all positions. cos, sin: [positions, head_dim], in the model's dtype."""

    def __init__(self, config: dict[str, Any], positions: int, dtype: torch.dtype, device: torch.device) -> None:
        rope, head_dim = config["rope_parameters"], config["head_dim"]
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
        cos, sin = rope_table(positions, head_dim, rope["rope_theta"], frequencies)
        self.cos = (cos * scale).to(device=device, dtype=dtype)
        self.sin = (sin * scale).to(device=device, dtype=dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the tokens of a batch. positions: int64 [tokens]."""
        return self.cos[positions], self.sin[positions]

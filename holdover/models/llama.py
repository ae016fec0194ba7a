"""Llama, and Mistral, which is Llama with a sliding window in some of its sizes.

Sources: Llama Team, "The Llama 3 Herd of Models" (2024); Jiang et al., "Mistral 7B" (2023).
"""

from typing import Any

import torch

from holdover.models.attention import Attention, normalise_attention
from holdover.models.decoder import Branch, Decoder, Place, feed_forward, pre_normed
from holdover.models.loader import Weights, positive, require
from holdover.models.rotary import Rotary


def llama(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "llama" or "mistral". Raises ModelError."""
    config = normalise_attention(config)
    require(config, {"layer_types": lambda x: x is None or len(set(x)) == 1})
    context_length, window = config["max_position_embeddings"], None
    if config["model_type"] == "mistral" and config.get("sliding_window") is not None:
        positive(config, "sliding_window")
        require(config, {"sliding_window": lambda x: x > 1})
        if config["sliding_window"] < context_length:  # else all is seen anyway
            window = config["sliding_window"]

    def make_layer(index: int, weights: Weights, place: Place) -> tuple[Branch, Branch]:
        attention = Attention(config, index, weights, place, window=window)
        prefixes = (f"model.layers.{index}.mlp",)
        dense = feed_forward(weights, place, prefixes, config["hidden_size"], config["intermediate_size"])
        return pre_normed(config, index, weights, place, attention, dense)

    rotary = Rotary.of(config["rope_parameters"], config, context_length, config["head_dim"])
    return Decoder(
        config, weights, dtype, device, make_layer, context_length=context_length, rotaries={"default": rotary}
    )

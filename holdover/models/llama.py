"""Llama, and Mistral, which is Llama with a sliding window in some of its sizes.

Sources: Llama Team, "The Llama 3 Herd of Models" (2024); Jiang et al., "Mistral 7B" (2023).
"""

from typing import Any

import torch

from holdover.models.attention import Attention, normalise_attention
from holdover.models.decoder import Decoder, Layer, Place, feed_forward, layer_norms
from holdover.models.loader import Weights, positive, require


def llama(config: dict[str, Any], weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A checkpoint of model_type "llama" or "mistral". Raises ModelError."""
    config = normalise_attention(config)
    window: int | None = None
    if config["model_type"] == "mistral" and config.get("sliding_window") is not None:
        positive(config, "sliding_window")
        require(config, {"sliding_window": lambda x: x > 1})
        if config["sliding_window"] < config["max_position_embeddings"]:  # else all is seen anyway
            window = config["sliding_window"]

    def make_layer(index: int, weights: Weights, place: Place) -> Layer:
        input_norm, post_norm = layer_norms(config, index, weights, place)
        attention = Attention(config, index, weights, place, window=window)
        prefixes = (f"model.layers.{index}.mlp",)
        inner = config["intermediate_size"]
        return Layer(
            input_norm, attention, post_norm, feed_forward(weights, place, prefixes, config["hidden_size"], inner)
        )

    context_length = config["max_position_embeddings"]
    return Decoder(config, weights, dtype, device, make_layer, context_length=context_length, rotary=True)

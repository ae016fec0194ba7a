"""Small checkpoints with seeded weights, made from Transformers' configurations."""

import json
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    KimiLinearConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 320


def kimi_linear_config(**changes: object) -> KimiLinearConfig:
    return KimiLinearConfig(
        **{
            "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
            "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_local_experts": 6,
            "num_experts_per_tok": 2, "linear_head_dim": 16, "linear_num_heads": 2, "max_position_embeddings": 1024,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
            **changes,
        }
    )  # fmt: skip


DENSE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
SPARSE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def make_config(model_type: str, **changes: object) -> PreTrainedConfig:
    """A small configuration of a type that we serve."""
    match model_type:
        case "kimi_linear":
            return kimi_linear_config(**changes)
        case "qwen3":
            return Qwen3Config(**{**DENSE, **changes})
        case "qwen3_moe":
            return Qwen3MoeConfig(**{**DENSE, **SPARSE, **changes})
        case "llama":
            return LlamaConfig(**{**DENSE, **changes})
        case "mistral":
            return MistralConfig(**{**DENSE, "sliding_window": 24, **changes})
    raise ValueError(model_type)


def make_reference(model_type: str, seed: int = 0, **changes: object) -> torch.nn.Module:
    """Transformers' own model, with every weight drawn, so that no term of any layer is zero or one by chance."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(model_type, **changes))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name and name.endswith("weight"):
                tensor.uniform_(0.5, 1.5)
            if name.endswith(("e_score_correction_bias", "proj.bias")):
                tensor.uniform_(-0.1, 0.1)
    return model.eval()


def save_checkpoint(
    folder: Path, model_type: str, seed: int = 0, shard: str = "5GB", **changes: object
) -> torch.nn.Module:
    """Write a checkpoint folder and return Transformers' model of it."""
    model = make_reference(model_type, seed, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

"""Small checkpoints with seeded weights, made from Transformers' configurations."""

import json
from copy import deepcopy
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

VOCAB_SIZE = 320
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1}
DENSE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, **SPECIAL,
}  # fmt: skip
HEADS = {key: value for key, value in DENSE.items() if key != "head_dim"}  # their size follows from the model's
SPARSE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "layer_types": HYBRID, "num_hidden_layers": 4,
}  # fmt: skip
GATED = {**DENSE, **DELTA, "head_dim": 32}
SHARED = {**SPARSE, "shared_expert_intermediate_size": 48}
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 32,
}  # fmt: skip
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4, "conv_L_cache": 3}
UNIT_OFFSET = ("qwen3_5", "qwen3_next")  # most norms' weights are kept less one
# By model_type: the configuration's class, and settings that make it small.
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "bamba": ("BambaConfig", {**HEADS, **MAMBA, "attn_layer_indices": [1]}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **HEADS, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3,
            "topk_group": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        },
    ),
    "falcon_h1": ("FalconH1Config", {**DENSE, **MAMBA, "mamba_d_ssm": 128}),
    "falcon_mamba": (
        "FalconMambaConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "state_size": 12, "num_hidden_layers": 3, "expand": 2, **SPECIAL},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**DENSE, "num_hidden_layers": 4, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **HEADS, **MAMBA, "num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
            "embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 3.0,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            **HEADS, "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 4,
            "num_experts_per_tok": 2, "mamba_d_state": 12, "mamba_dt_rank": 8,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **HEADS, "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
            "num_key_value_heads": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
            "v_head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "linear_head_dim": 16,
            "linear_num_heads": 2, "layer_types": HYBRID,
        },
    ),
    "lfm2": ("Lfm2Config", {**HEADS, **CONVOLUTIONS}),
    "lfm2_moe": ("Lfm2MoeConfig", {**HEADS, **CONVOLUTIONS, **SPARSE, "num_dense_layers": 1}),
    "llama": ("LlamaConfig", DENSE),
    "mamba2": (
        "Mamba2Config",
        {
            "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 24,
            "n_groups": 2, "num_hidden_layers": 3, "chunk_size": 32, **SPECIAL,
        },
    ),
    "mistral": ("MistralConfig", {**DENSE, "sliding_window": 24}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **DENSE, "layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba"], "mamba_num_heads": 8,
            "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "chunk_size": 32, "n_routed_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
        },
    ),
    "olmo3": ("Olmo3Config", {**HEADS, "num_hidden_layers": 4, "sliding_window": 24}),
    "olmo_hybrid": ("OlmoHybridConfig", {**HEADS, **DELTA, "linear_num_key_heads": 4, "linear_value_head_dim": 16}),
    "qwen3": ("Qwen3Config", DENSE),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**GATED, **SHARED}),
    "qwen3_5_text": ("Qwen3_5TextConfig", GATED),
    "qwen3_moe": ("Qwen3MoeConfig", {**DENSE, **SPARSE}),
    "qwen3_next": ("Qwen3NextConfig", {**GATED, **SHARED}),
}  # fmt: skip


def make_config(model_type: str, **changes: object) -> PreTrainedConfig:
    """A small configuration of a type that we serve."""
    name, settings = KINDS[model_type]
    return getattr(transformers, name)(**deepcopy({**settings, **changes}))  # configurations write into what they get


def make_reference(model_type: str, seed: int = 0, **changes: object) -> torch.nn.Module:
    """Transformers' own model, with every weight drawn, so that no term of any layer is zero or one by chance."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(model_type, **changes))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name and name.endswith("weight"):
                tensor.uniform_(0.5, 1.5)
                if model_type.startswith(UNIT_OFFSET) and "linear_attn" not in name:
                    tensor -= 1.0
            if name.endswith(("bias", "sinks")):
                tensor.uniform_(-0.1, 0.1)
            if name.endswith("dt_bias"):
                tensor.uniform_(-3.0, 0.5)
            if name.endswith("A_log"):  # larger ones, and sums over chunks of the reference lose digits
                tensor.uniform_(-2.0, 0.7)
            if name.endswith(".D"):
                tensor.uniform_(0.5, 1.5)
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

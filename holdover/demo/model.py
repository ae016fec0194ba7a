"""The demo's model: the shape of Kimi-Linear at about 25 M parameters, seeded weights, made on first use."""

import json
import logging
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from holdover.ops.native import cache_folder

log = logging.getLogger(__name__)
VERSION = 1
SEED = 20260801
VOCAB_SIZE = 8192
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>"]
CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 96,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "head_dim": 32,
        "num_heads": 6,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
    },
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "model_max_length": 32768,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
CHAT_TEMPLATE = """\
{%- if tools %}<|tools|>{{ tools | tojson }}<|end|>
{% endif %}
{%- for message in messages %}<|{{ message['role'] if message['role'] != 'developer' else 'system' }}|>\
{{ message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}
{{ call['function']['name'] }}({{ call['function']['arguments'] | tojson }})
{%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def demo_model() -> Path:
    """The checkpoint folder, made if it is not there yet. The same on every machine, up to the last bit of weights."""
    folder = cache_folder() / f"demo-model-{VERSION}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        _write_tokenizer(made)
        save_file(_weights(), str(made / "model.safetensors"), metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(CONFIG, indent=2))
        try:
            os.rename(made, folder)
        except OSError:
            if not (folder / "config.json").exists():  # a broken earlier try, or a real fault
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(made, folder)
    return folder


def demo_text() -> list[str]:
    """All message texts of the shipped tau-bench sessions."""
    content = lzma.decompress(files("holdover.demo").joinpath("data/tau-bench-airline.jsonl.xz").read_bytes())
    sessions = (json.loads(line) for line in content.splitlines())
    return [message["content"] for session in sessions for message in session["messages"] if message.get("content")]


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(demo_text(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "model_max_length": CONFIG["model_max_length"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _weights() -> dict[str, torch.Tensor]:
    """Every weight of the checkpoint, under the names of Moonshot's own."""
    generator = torch.Generator().manual_seed(SEED)
    weights: dict[str, torch.Tensor] = {}

    def normal(name: str, *shape: int, scale: float | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        deviation = shape[-1] ** -0.5 if scale is None else scale
        weights[name] = (torch.randn(*shape, generator=generator) * deviation).to(dtype)

    def ones(name: str, size: int) -> None:
        weights[name] = torch.ones(size, dtype=torch.bfloat16)

    def uniform(name: str, low: float, high: float, *shape: int) -> None:
        weights[name] = torch.empty(*shape).uniform_(low, high, generator=generator)

    hidden, latent, shared = CONFIG["hidden_size"], CONFIG["kv_lora_rank"], CONFIG["qk_rope_head_dim"]
    nope, value, heads = CONFIG["qk_nope_head_dim"], CONFIG["v_head_dim"], CONFIG["num_attention_heads"]
    linear = CONFIG["linear_attn_config"]
    width, head_dim = linear["head_dim"] * linear["num_heads"], linear["head_dim"]
    normal("model.embed_tokens.weight", VOCAB_SIZE, hidden, scale=1.0)
    for i in range(CONFIG["num_hidden_layers"]):
        attention = f"model.layers.{i}.self_attn"
        ones(f"model.layers.{i}.input_layernorm.weight", hidden)
        ones(f"model.layers.{i}.post_attention_layernorm.weight", hidden)
        if i + 1 in linear["full_attn_layers"]:
            normal(f"{attention}.q_proj.weight", heads * (nope + shared), hidden)
            normal(f"{attention}.kv_a_proj_with_mqa.weight", latent + shared, hidden)
            ones(f"{attention}.kv_a_layernorm.weight", latent)
            normal(f"{attention}.kv_b_proj.weight", heads * (nope + value), latent)
            normal(f"{attention}.o_proj.weight", hidden, heads * value)
        else:
            for part in "qkv":
                normal(f"{attention}.{part}_proj.weight", width, hidden)
                normal(f"{attention}.{part}_conv1d.weight", width, 1, linear["short_conv_kernel_size"])
            for part in "fg":
                normal(f"{attention}.{part}_a_proj.weight", head_dim, hidden)
                normal(f"{attention}.{part}_b_proj.weight", width, head_dim)
            normal(f"{attention}.b_proj.weight", linear["num_heads"], hidden)
            uniform(f"{attention}.A_log", 0.0, 2.77, 1, 1, linear["num_heads"], 1)
            uniform(f"{attention}.dt_bias", -6.9, -2.3, width)
            ones(f"{attention}.o_norm.weight", head_dim)
            normal(f"{attention}.o_proj.weight", hidden, width)
        _feed_forward(i, normal, uniform)
    ones("model.norm.weight", hidden)
    normal("lm_head.weight", VOCAB_SIZE, hidden, scale=0.25)
    return weights


def _feed_forward(layer: int, normal: Callable[..., None], uniform: Callable[..., None]) -> None:
    hidden, inner, count = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["num_experts"]
    if layer < CONFIG["first_k_dense_replace"]:
        for part in ("gate", "up"):
            normal(f"model.layers.{layer}.mlp.{part}_proj.weight", CONFIG["intermediate_size"], hidden)
        normal(f"model.layers.{layer}.mlp.down_proj.weight", hidden, CONFIG["intermediate_size"])
        return
    mixture = f"model.layers.{layer}.block_sparse_moe"
    normal(f"{mixture}.gate.weight", count, hidden, dtype=torch.float32)
    uniform(f"{mixture}.gate.e_score_correction_bias", -0.02, 0.02, count)
    for expert in range(count):
        normal(f"{mixture}.experts.{expert}.w1.weight", inner, hidden)
        normal(f"{mixture}.experts.{expert}.w3.weight", inner, hidden)
        normal(f"{mixture}.experts.{expert}.w2.weight", hidden, inner)
    for part in ("gate", "up"):
        normal(f"{mixture}.shared_experts.{part}_proj.weight", inner, hidden)
    normal(f"{mixture}.shared_experts.down_proj.weight", hidden, inner)

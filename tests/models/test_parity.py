"""Our models give what Transformers' own give, however a prompt is cut into chunks and mixed with others."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from holdover.errors import ModelError
from holdover.models.base import Batch, BatchSequence, Model
from holdover.models.registry import load_model
from holdover.ops import native
from holdover.ops.delta import kimi_delta_attention_torch
from holdover.state.pool import DevicePool
from tests.checkpoints import KINDS, VOCAB_SIZE, save_checkpoint


class Feeder:
    """Feeds sequences to a model by hand, each with its own slots and live row."""

    def __init__(self, model: Model, max_running: int = 4) -> None:
        self.model = model
        self.pool = DevicePool(model.layout, 8 << 20, max_running, torch.device("cpu"))
        self.tables = [np.empty(0, dtype=np.int64) for _ in range(max_running)]
        self.windows = [np.empty((0, self.pool.slots_per_window_row), dtype=np.int64) for _ in range(max_running)]
        self.padding = 0

    @torch.inference_mode()
    def feed(self, parts: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Feed new tokens to some sequences in one batch; logits of every token fed, by sequence."""
        ids, positions, slots, sequences = [], [], [], []
        for row, tokens in parts.items():
            new, window = self.pool.allocate_rows(len(tokens)), self.pool.allocate_window(len(tokens))
            assert new is not None
            assert window is not None
            start = len(self.tables[row])
            self.tables[row] = np.concatenate([self.tables[row], new])
            self.windows[row] = np.concatenate([self.windows[row], window])
            seen = self.windows[row][max(0, start - self.model.layout.window) :]
            ids += tokens
            positions += range(start, start + len(tokens))
            slots += new.tolist()
            window_table = torch.from_numpy(seen) if self.model.layout.window else None
            sequences.append(BatchSequence(torch.from_numpy(self.tables[row]), len(tokens), row, window_table))
        padding = [0] * self.padding
        batch = Batch(torch.tensor(ids + padding), torch.tensor(positions + padding), torch.tensor(slots), sequences)
        logits = self.model.logits(self.model.forward(batch, self.pool))
        return {row: logits[a:b] for row, (a, b) in zip(parts, batch.bounds, strict=True)}


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
VARIANTS: dict[str, dict[str, object]] = {
    "grouped": {"n_group": 3, "topk_group": 2, "q_lora_rank": 24, "norm_topk_prob": False},
    "tied": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "biased": {"attention_bias": True, "num_key_value_heads": 4, "head_dim": None},
    "mixed": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "stepped": {"decoder_sparse_step": 2},
    "full": {"sliding_window": None},
    "narrow": {"sliding_window": 2},
    "wide": {"sliding_window": 257, "attention_bias": False},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "yarn": {"rope_parameters": YARN},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "longrope": {
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 10 for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 1024, "factor": 1.0,
        },
    },
}  # fmt: skip
HYBRIDS: dict[str, dict[str, object]] = {
    "bamba-plain": {
        "mamba_n_groups": 1, "mamba_conv_bias": False, "mamba_proj_bias": True, "tie_word_embeddings": True,
    },
    "bamba-limited": {"time_step_limit": (0.05, 0.3), "attention_bias": True, "rope_parameters": YARN},
    "deepseek_v3-yarn": {
        "q_lora_rank": None, "attention_bias": True, "rope_interleave": False,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v3-plain": {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
    "falcon_h1-scaled": {
        "embedding_multiplier": 5.0, "lm_head_multiplier": 0.3, "attention_in_multiplier": 0.9, "key_multiplier": 0.5,
        "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.7, "mamba_rms_norm": True,
        "ssm_multipliers": [0.9, 0.8, 0.7, 1.2, 1.1], "mlp_multipliers": [0.6, 1.4],
    },
    "falcon_h1-gate_first": {
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True, "mamba_proj_bias": True,
    },
    "falcon_mamba-biased": {
        "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False, "time_step_rank": 9,
    },
    "gpt_oss-full": {"layer_types": ["full_attention"] * 4, "swiglu_limit": 0.5, "rope_parameters": None},
    "granitemoehybrid-dense": {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1},
    "granitemoehybrid-biased": {"attention_bias": True, "mamba_proj_bias": True, "tie_word_embeddings": True},
    "jamba-dense": {"num_experts": 1, "num_experts_per_tok": 1, "mamba_proj_bias": True, "mamba_conv_bias": False},
    "lfm2-biased": {"conv_bias": True, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4},
    "lfm2-adjusted": {"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3, "tie_word_embeddings": False},
    "lfm2_moe-plain": {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 2.0},
    "mamba2-biased": {"use_bias": True, "use_conv_bias": False, "n_groups": 1, "time_step_limit": (0.01, 0.2)},
    "nemotron_h-latent": {"moe_latent_size": 24, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
    "nemotron_h-biased": {"use_bias": True, "mamba_proj_bias": True, "norm_topk_prob": False},
    "olmo3-scaled": {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    "olmo_hybrid-positive": {"linear_allow_neg_eigval": False, "rope_parameters": None, "attention_bias": True},
    "qwen3_next-mixed": {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False},
    "qwen3_next-biased": {"attention_bias": True, "linear_num_key_heads": 4, "partial_rotary_factor": 0.5},
    "qwen3_5_text-tied": {"tie_word_embeddings": True, "linear_conv_kernel_dim": 2},
}  # fmt: skip
PAIRS = [
    *sorted(KINDS), "kimi_linear-grouped", "qwen3-tied", "qwen3-yarn", "qwen3_moe-mixed", "qwen3_moe-stepped",
    "llama-biased", "llama-tied", "llama-linear", "llama-dynamic", "llama-yarn", "llama-llama3", "llama-longrope",
    "mistral-full", "mistral-narrow", "mistral-wide", *HYBRIDS,
]  # fmt: skip


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, torch.nn.Module]:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    kind, _, variant = request.param.partition("-")
    changes = HYBRIDS.get(request.param) or VARIANTS.get(variant, {})
    reference = save_checkpoint(folder, kind, **changes)
    return load_model(folder, "float32"), reference


def cut_at_random(tokens: list[int], rng: random.Random) -> list[list[int]]:
    chunks, first = [], 0
    while first < len(tokens):
        length = rng.choice([1, 2, 3, rng.randint(1, 64), rng.randint(1, 300)])
        chunks.append(tokens[first : first + length])
        first += length
    return chunks


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 17, 63, 64, 65, 191, 300, 600])
def test_logits_equal_those_of_transformers_however_the_prompt_is_cut(
    pair: tuple[Model, torch.nn.Module], length: int
) -> None:
    model, reference = pair
    rng = random.Random(length)
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    for _ in range(3):
        feeder = Feeder(model)
        got = torch.cat([feeder.feed({0: chunk})[0] for chunk in cut_at_random(tokens, rng)])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_greedy_tokens_equal_those_of_transformers_in_a_mixed_batch(pair: tuple[Model, torch.nn.Module]) -> None:
    model, reference = pair
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 40, 300)]
    feeder = Feeder(model)
    feeder.padding = 5  # padding tokens must not touch any state
    made: dict[int, list[int]] = {row: [] for row in range(3)}
    waiting = {row: cut_at_random(prompt, rng) for row, prompt in enumerate(prompts)}
    while min(len(tokens) for tokens in made.values()) < 20:
        parts = {row: waiting[row].pop(0) if waiting[row] else [made[row][-1]] for row in range(3)}
        for row, logits in feeder.feed(parts).items():
            if not waiting[row]:
                made[row].append(int(logits[-1].argmax()))
    for row, prompt in enumerate(prompts):
        tokens = [*prompt, *made[row][:20]]
        with torch.inference_mode():  # one pass over what came out: each token must be the best after those before it
            best = reference(torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        assert tokens[len(prompt) :] == best[len(prompt) - 1 : -1]


def test_live_state_does_not_depend_on_how_a_prompt_is_cut(pair: tuple[Model, torch.nn.Module]) -> None:
    model, _ = pair
    rng = random.Random(3)
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(150)]
    feeder = Feeder(model)
    feeder.feed({0: tokens})
    for chunk in cut_at_random(tokens, rng):
        feeder.feed({1: chunk})
    for name, view in feeder.pool.live_views.items():
        torch.testing.assert_close(view[1].float(), view[0].float(), atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.skipif(native.library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_delta_kernel_equals_the_pytorch_one(dtype: torch.dtype) -> None:
    from holdover.ops.delta import kimi_delta_attention
    from holdover.ops.sequences import LiveSequences

    torch.manual_seed(0)
    heads, head_dim, kernel, rows = 3, 16, 4, 4
    width, lengths = heads * head_dim, [5, 1, 33]
    tokens = sum(lengths)
    state_bytes, tail_bytes = heads * head_dim * head_dim * 4, (kernel - 1) * 3 * width * dtype.itemsize
    lives = torch.zeros(2, rows, state_bytes + tail_bytes, dtype=torch.uint8)
    recurrent = torch.randn(rows, heads, head_dim, head_dim)
    tails = torch.randn(rows, kernel - 1, 3 * width).to(dtype)
    arguments = (
        torch.randn(tokens, 3 * width).to(dtype), (3 * torch.randn(tokens, width)).to(dtype), torch.randn(width),
        -torch.rand(width), torch.randn(tokens, heads).to(dtype), torch.randn(tokens, width).to(dtype),
        torch.randn(kernel, 3 * width), torch.rand(head_dim) + 0.5, 1e-5,
    )  # fmt: skip
    outputs, states = [], []
    for live, kernel_function in zip(lives, (kimi_delta_attention, kimi_delta_attention_torch), strict=True):
        state = live[:, :state_bytes].view(torch.float32).view(rows, heads, head_dim, head_dim)
        tail = live[:, state_bytes:].view(dtype).view(rows, kernel - 1, 3 * width)
        state.copy_(recurrent)
        tail.copy_(tails)
        starts = torch.tensor([0, 5, 6, 39])
        sequences = LiveSequences(starts, torch.tensor([2, 0, 3]), live)
        outputs.append(kernel_function(*arguments, state, tail, sequences))
        states.append((state.clone(), tail.clone()))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(outputs[0], outputs[1], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states[0][0], states[1][0], atol=1e-5, rtol=1e-5)
    assert torch.equal(states[0][1], states[1][1])


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("llama", {"rope_scaling": "linear"}, "no object"), ("llama", {"rope_theta": "x"}, "rope_theta"),
        ("llama", {"rope_parameters": {"rope_type": "su"}}, "su.*default"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "low_freq_factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "can't be used"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"mlp_bias": True}, "mlp_bias"), ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"head_dim": 15}, "head_dim"), ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("mistral", {"sliding_window": 1}, "sliding_window"), ("mistral", {"sliding_window": -3}, "sliding_window"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ("qwen3_next", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2}}, "partial_rotary_factor"),
        ("qwen3_next", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}}, "rotary dimensions"),
        ("qwen3_5_text", {"layer_types": ["mamba"] * 4}, "layer_types"), ("lfm2", {"conv_L_cache": 1}, "conv_L_cache"),
        ("bamba", {"mamba_d_head": 15}, "mamba_d_head"), ("bamba", {"time_step_limit": [0]}, "time_step_limit"),
        ("bamba", {"mamba_d_conv": 1}, "Mamba-2"), ("bamba", {"mlp_bias": True}, "mlp_bias"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("granitemoehybrid", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_h", {"sliding_window": 9}, "sliding_window"),
        ("nemotron_h", {"layers_block_type": ["mamba", "rwkv"]}, "layers_block_type"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers"), ("jamba", {"num_experts": 1.5}, "num_experts"),
        ("falcon_mamba", {"conv_kernel": 1}, "convolution"), ("mamba2", {"num_heads": 9}, "num_heads"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window"),
        ("gpt_oss", {"quantization_config": {"a": 1}}, "quantization"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"), ("deepseek_v3", {"topk_group": 4}, "topk_group"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("olmo_hybrid", {"linear_key_head_dim": None}, "linear_key_head_dim"),
    ],
)  # fmt: skip
def test_settings_that_we_do_not_follow_are_refused_by_name(
    kind: str, changes: dict[str, object], why: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, kind)
    config = json.loads((tmp_path / "config.json").read_text())
    if "rope_scaling" in changes or "rope_theta" in changes:
        config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=why):
        load_model(tmp_path, "float32")

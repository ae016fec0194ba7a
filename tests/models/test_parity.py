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
from tests.checkpoints import VOCAB_SIZE, save_checkpoint


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
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256,
        }
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "longrope": {
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 10 for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 512, "factor": 1.0,
        },
    },
}  # fmt: skip
PAIRS = [
    "kimi_linear", "kimi_linear-grouped", "qwen3", "qwen3-tied", "qwen3-yarn", "qwen3_moe", "qwen3_moe-mixed",
    "qwen3_moe-stepped", "llama", "llama-biased", "llama-tied", "llama-linear", "llama-dynamic", "llama-yarn",
    "llama-llama3", "llama-longrope", "mistral", "mistral-full", "mistral-narrow", "mistral-wide",
]  # fmt: skip


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, torch.nn.Module]:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    kind, _, variant = request.param.partition("-")
    reference = save_checkpoint(folder, kind, **VARIANTS.get(variant, {}))
    return load_model(folder, "float32"), reference


def cut_at_random(tokens: list[int], rng: random.Random) -> list[list[int]]:
    chunks, first = [], 0
    while first < len(tokens):
        length = rng.choice([1, 2, 3, rng.randint(1, 64), rng.randint(1, 300)])
        chunks.append(tokens[first : first + length])
        first += length
    return chunks


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 17, 63, 64, 65, 128, 191, 300])
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
        with torch.inference_mode():
            expected = list(prompt)
            for _ in range(20):
                expected.append(int(reference(torch.tensor([expected])).logits[0, -1].argmax()))
        assert made[row][:20] == expected[len(prompt) :]


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

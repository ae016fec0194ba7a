"""Each compiled kernel gives what the plain form of the same computation gives."""

import pytest
import torch
import torch.nn.functional as F

from holdover.ops import native
from holdover.ops.attention import _latent_chunk, latent_attention
from holdover.ops.experts import ExpertFeedForward, FeedForward, gated_silu
from holdover.ops.linear import Linear
from holdover.ops.norm import rms_norm

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler on this machine")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def exact_latent_attention(
    q: torch.Tensor, rows: torch.Tensor, latent: int, scale: float, table: torch.Tensor
) -> torch.Tensor:
    """In float64, with the whole matrix of scores."""
    keys = rows[table].double()
    scores = torch.einsum("qhd,kd->qhk", q.double(), keys) * scale
    start = len(table) - len(q)
    hidden = torch.arange(len(table))[None] > (start + torch.arange(len(q)))[:, None]
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    return torch.einsum("qhk,kd->qhd", weights, keys[:, :latent])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 31), (1, 700), (2, 2), (7, 7), (7, 300), (33, 256), (65, 257), (150, 1000)]
)
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_latent_attention_equals_float64(dtype: torch.dtype, queries: int, keys: int, heads: int) -> None:
    torch.manual_seed(queries * keys + heads)
    latent, width = 64, 96
    rows = torch.randn(2000, width + 16).to(dtype)[:, :width]  # rows of an arena lie apart
    table = torch.randperm(2000)[:keys]
    q = torch.randn(queries, heads, width).to(dtype)
    expected = exact_latent_attention(q, rows, latent, 0.2, table)
    got = latent_attention(q, rows, latent, 0.2, [(0, queries)], [table])
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    plain = torch.empty(queries, heads, latent, dtype=dtype)
    _latent_chunk(q, rows, latent, 0.2, table, plain)
    torch.testing.assert_close(plain.double(), expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (3, 96), (500, 384)])
def test_rms_norm_equals_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[1]) + 0.5
    expected = F.rms_norm(x.double(), shape[1:], weight.double(), 1e-5)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (5, 768), (300, 1024)])
def test_gated_silu_equals_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    inner = torch.randn(shape).to(dtype)
    gate, up = inner.double().chunk(2, dim=-1)
    torch.testing.assert_close(
        gated_silu(inner).double(), F.silu(gate) * up, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 40, 300])
def test_experts_equal_a_loop_over_tokens(
    dtype: torch.dtype, tokens: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(native, "has_matrix_unit", lambda _: False)
    torch.manual_seed(tokens)
    hidden, inner, count, top_k = 32, 64, 5, 2
    x, shared = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, hidden).to(dtype)
    gate_up = (torch.randn(count, hidden, 2 * inner) / hidden**0.5).to(dtype)
    down = (torch.randn(count, inner, hidden) / inner**0.5).to(dtype)
    experts = torch.stack([torch.randperm(count - 1)[:top_k] for _ in range(tokens)])  # the last expert stays idle
    weights = torch.rand(tokens, top_k)
    expected = shared.double()
    for t in range(tokens):
        for k in range(top_k):
            gate, up = (x[t].double() @ gate_up[experts[t, k]].double()).chunk(2)
            expected[t] += weights[t, k].double() * ((F.silu(gate) * up) @ down[experts[t, k]].double())
    layers = ExpertFeedForward(gate_up.transpose(1, 2), down.transpose(1, 2))
    got = layers(x, weights, experts, shared)
    torch.testing.assert_close(got.double(), expected, atol=4 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 17, 40, 300, 600])
@pytest.mark.parametrize(("hidden", "inner"), [(32, 64), (96, 160), (40, 24)])
def test_feed_forward_equals_float64(dtype: torch.dtype, tokens: int, hidden: int, inner: int) -> None:
    torch.manual_seed(tokens)
    gate_up = (torch.randn(2 * inner, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(hidden, inner) / inner**0.5).to(dtype)
    x = torch.randn(tokens, hidden).to(dtype)
    gate, up = (x.double() @ gate_up.double().t()).chunk(2, dim=-1)
    expected = (F.silu(gate) * up) @ down.double().t()
    got = FeedForward(gate_up, down)(x)
    torch.testing.assert_close(got.double(), expected, atol=4 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 7), (64, 32), (96, 161), (40, 12)])
def test_linear_equals_float64(dtype: torch.dtype, tokens: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(tokens)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    x = torch.randn(tokens, inputs + 8).to(dtype)[:, :inputs]  # rows that lie apart
    out = torch.full((tokens, outputs + 5), 7.0, dtype=dtype)
    got = Linear(weight)(x, out=out[:, :outputs])
    torch.testing.assert_close(
        got.double(), x.double() @ weight.double().t(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert (out[:, outputs:] == 7.0).all(), "wrote past its columns"

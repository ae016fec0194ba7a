"""Recurrences and convolutions give what naive loops over tokens in float64 give, compiled and in PyTorch, for batches
of unlike sequences; of the compiled ones no bit depends on how a prompt is cut."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from holdover.ops import native
from holdover.ops.conv import causal_conv
from holdover.ops.recurrence import outer_recurrence, selective_scan
from holdover.ops.sequences import LiveSequences

LENGTHS, LIVE_ROWS, MAX_RUNNING = [5, 1, 33], [2, 0, 3], 4
TOKENS = sum(LENGTHS)
PADDING = 3  # tokens of no sequence


@pytest.fixture(params=["compiled", "pytorch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pytorch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C compiler on this machine")
    return request.param


def live_state(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Live rows with a state of this shape somewhere in them, drawn, and the view of it."""
    numbers = int(torch.tensor(shape).prod())
    live = torch.zeros(MAX_RUNNING, 64 + numbers * dtype.itemsize, dtype=torch.uint8)
    view = live[:, 64:].view(dtype).view(MAX_RUNNING, *shape)
    view.copy_(torch.randn(MAX_RUNNING, *shape))
    return live, view


def sequences_of(live: torch.Tensor, lengths: list[int] = LENGTHS, rows: list[int] = LIVE_ROWS) -> LiveSequences:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return LiveSequences(starts, torch.tensor(rows), live)


def check(
    run: Callable[[slice, LiveSequences], torch.Tensor],
    naive: Callable[[int, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    live: torch.Tensor,
    state: torch.Tensor,
    tolerance: float = 1e-5,
) -> None:
    """`run` over tokens of a batch against `naive` over those of one sequence, from its state on."""
    before, other_row = state.clone(), 1
    out = run(slice(0, TOKENS + PADDING), sequences_of(live))
    first = 0
    for length, row in zip(LENGTHS, LIVE_ROWS, strict=True):
        expected, after = naive(first, first + length, before[row].double())
        torch.testing.assert_close(out[first : first + length].double(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(state[row].double(), after, atol=tolerance, rtol=tolerance)
        first += length
    assert torch.equal(state[other_row], before[other_row])
    assert not out[TOKENS:].any(), "tokens of no sequence give nothing"
    whole, after = out[6:TOKENS].clone(), state[3].clone()
    state.copy_(before)
    parts = [run(slice(6 + a, 6 + b), sequences_of(live, [b - a], [3])) for a, b in ((0, 1), (1, 20), (20, 33))]
    if native.library() is None:
        torch.testing.assert_close(torch.cat(parts), whole)
        torch.testing.assert_close(state[3], after)
    else:
        assert torch.equal(torch.cat(parts), whole) and torch.equal(state[3], after), "cut into chunks, bit for bit"


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize(("key_heads", "heads", "keys", "width"), [(2, 4, 16, 24), (3, 3, 5, 7), (1, 2, 128, 64)])
def test_outer_products(kernels: str, delta: bool, key_heads: int, heads: int, keys: int, width: int) -> None:
    torch.manual_seed(keys)
    n = TOKENS + PADDING
    q, k = (F.normalize(torch.randn(n, key_heads, keys), dim=-1) for _ in "qk")
    v, decay = torch.randn(n, heads, width), torch.rand(n, heads)
    beta = 2 * torch.rand(n, heads) if delta else None
    live, state = live_state((heads, keys, width))

    def run(part: slice, sequences: LiveSequences) -> torch.Tensor:
        strengths = None if beta is None else beta[part]
        return outer_recurrence(q[part], k[part], v[part], decay[part], strengths, state, sequences)

    def naive(first: int, last: int, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = []
        for t in range(first, last):
            rows = []
            for head in range(heads):
                query, key = (each[t, head * key_heads // heads].double() for each in (q, k))
                matrix = now[head] * decay[t, head].double()
                value = v[t, head].double()
                if beta is not None:
                    value = beta[t, head].double() * (value - matrix.t() @ key)
                now[head] = matrix + torch.outer(key, value)
                rows.append(now[head].t() @ query)
            made.append(torch.stack(rows))
        return torch.stack(made), now

    check(run, naive, live, state)


@pytest.mark.parametrize(("channels", "states"), [(24, 16), (300, 5), (7, 1)])
def test_selective_scans(kernels: str, channels: int, states: int) -> None:
    torch.manual_seed(channels)
    n = TOKENS + PADDING
    x, step = torch.randn(n, channels), F.softplus(torch.randn(n, channels))
    rates, b, c = -torch.rand(states, channels) * 4, torch.randn(n, states), torch.randn(n, states)
    live, state = live_state((states, channels))

    def run(part: slice, sequences: LiveSequences) -> torch.Tensor:
        return selective_scan(x[part], step[part], rates, b[part], c[part], state, sequences)

    def naive(first: int, last: int, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = []
        for t in range(first, last):
            dt = step[t].double()
            now = torch.exp(dt * rates.double()) * now + torch.outer(b[t].double(), dt * x[t].double())
            made.append(c[t].double() @ now)
        return torch.stack(made), now

    check(run, naive, live, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(("channels", "kernel", "biased"), [(24, 4, True), (300, 3, False), (5, 2, True)])
def test_convolutions(kernels: str, dtype: torch.dtype, silu: bool, channels: int, kernel: int, biased: bool) -> None:
    torch.manual_seed(channels)
    x = torch.randn(TOKENS + PADDING, 2 * channels).to(dtype)[:, :channels]  # rows lie apart
    weight, bias = torch.randn(kernel, channels), torch.randn(channels) if biased else None
    live, tail = live_state((kernel - 1, channels), dtype)

    def run(part: slice, sequences: LiveSequences) -> torch.Tensor:
        return causal_conv(x[part], weight, bias, tail, sequences, silu=silu)

    def naive(first: int, last: int, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.cat([now, x[first:last].double()])
        made = []
        for t in range(last - first):
            total = (inputs[t : t + kernel] * weight.double()).sum(0) + (0 if bias is None else bias.double())
            made.append(F.silu(total) if silu else total)
        return torch.stack(made), inputs[len(inputs) - kernel + 1 :]

    check(run, naive, live, tail)


def test_what_is_larger_than_the_kernels_is_refused() -> None:
    if native.library() is None:
        pytest.skip("no C compiler on this machine")
    live, tail = live_state((19, 8))
    with pytest.raises(ValueError, match="20 tokens"):
        causal_conv(torch.zeros(1, 8), torch.zeros(20, 8), None, tail, sequences_of(live, [1], [0]), silu=True)
    live, state = live_state((1, 2, 600))
    q, v, decay = torch.zeros(1, 1, 2), torch.zeros(1, 1, 600), torch.zeros(1, 1)
    with pytest.raises(ValueError, match="600 values"):
        outer_recurrence(q, q, v, decay, None, state, sequences_of(live, [1], [0]))

"""The oracle: a model whose state is made of digests of the tokens, and whose output is a function of all of it.

It has every kind of state, and no weights: a lost, swapped, stale or foreign row, a snapshot of another position or a
dropped part of one changes the next token at once. Served as `oracle:KIND` (or `oracle:KIND:SEED`; another seed is
another model). Arithmetic is modulo 2**64, so results are the same on every machine and for every cut into chunks.

With `t[j]` the token at position `j` (0 before the start), `mix` a 64-bit finalizer (Steele et al., "Fast splittable
pseudorandom number generators", OOPSLA 2014) and `K[n] = mix(seed + n * GOLDEN)`:

    c[j]  = mix(K0 + t[j] * K1 + t[j-1] * K2 + t[j-2] * K3 + t[j-3] * K4)      short convolution: a tail of 3 tokens
    h[j]  = h[j-1] * DECAY + mix(c[j] + L[lane])                               recurrent, 4 lanes
    o[j]  = mix(K6 + sum of h[j] * L over the lanes)                           0 without recurrent layers
    a[j]  = mix(o[j] + t[j] * K7 + j * K8)                                     token state, 64 bits
    b[j]  = mix(sum of mix(a[i] + i * K9) for i <= j)                          token state, 64 bits as two of 32
    d[j]  = mix(o[j] + sum of mix(b[i] + i * K10) for i <= j)
    w[j]  = mix(d[j] + t[j] * K11 + j * K12)                                   window row, 64 bits
    e[j]  = mix(d[j] + sum of mix(w[i] + i * K13) for j - W < i <= j)
    v[j]  = e[j], mix(e[j])                                                    window row, 128 bits as four of 32
    f[j]  = mix(e[j] + sum of mix(v[i] . (1, K14) + i * K15) for j - W < i <= j)  the hidden vector: its eight bytes

with `L[lane] = mix((lane + 1) * K5)` and a sliding window of W = 24 tokens. Kinds without token state leave the sums
over all tokens out (`d[j] = mix(o[j])`), kinds without sliding windows have `f[j] = d[j]`. The score of token `v` is
`mix(f[j] + v * GOLDEN) >> 43`.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from holdover.errors import ModelError
from holdover.models.base import Batch
from holdover.state.layout import LAST_HIDDEN, ArraySpec, Layout
from holdover.state.pool import DevicePool

PREFIX = "oracle:"
FOLDER = Path(__file__).parent / "oracle_tokenizer"  # bytes, and the four special tokens of ChatML
VOCAB_SIZE = 260
END_OF_TURN = 258
CONTEXT_LENGTH = 1 << 20
GOLDEN = 0x9E3779B97F4A7C15
DECAY = 0xD1342543DE82EF95
LANES = 4
TAIL = 3
WINDOW = 24
SCORE_SHIFT = 43

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class OracleKind:
    """Which kinds of state an oracle has."""

    attention: bool = False
    recurrent: bool = False
    window: bool = False


KINDS = {
    "hybrid": OracleKind(attention=True, recurrent=True),
    "dense": OracleKind(attention=True),
    "recurrent": OracleKind(recurrent=True),
    "sliding": OracleKind(window=True),
    "mixed": OracleKind(attention=True, window=True),
    "everything": OracleKind(attention=True, recurrent=True, window=True),
}


def mix(x: Words) -> Words:
    """Scramble 64-bit words, one to one."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _powers(base: int, count: int) -> Words:
    with np.errstate(over="ignore"):
        steps = np.full(count, base, dtype=np.uint64)
        steps[0] = 1
        return np.cumprod(steps, dtype=np.uint64)


def _sliding_sums(x: Words, count: int) -> Words:
    """For each of the last `count` of `x`, the sum of the WINDOW that end with it (fewer at the beginning)."""
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(x, dtype=np.uint64)])
    ends = np.arange(len(x) - count + 1, len(x) + 1)
    result: Words = sums[ends] - sums[np.maximum(ends - WINDOW, 0)]
    return result


class Oracle:
    """An oracle of one kind. Runs on the CPU, in float32 only as far as its last hidden vector goes."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.kind = KINDS[kind]
        self.seed = seed
        self.vocab_size = VOCAB_SIZE
        self.context_length = CONTEXT_LENGTH
        self.eos_token_ids = frozenset([END_OF_TURN])
        self.device = torch.device("cpu")
        steps = np.arange(1, 17, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(seed)
        self._k = mix(steps)
        self._lanes = mix(np.arange(1, LANES + 1, dtype=np.uint64) * self._k[5])
        self._scores = np.arange(VOCAB_SIZE, dtype=np.uint64) * np.uint64(GOLDEN)
        self._decay = _powers(DECAY, 1025)
        self._growth = _powers(pow(DECAY, -1, 1 << 64), 1025)
        self.layout = Layout(
            token_arrays=(
                (ArraySpec("layers.1.a", (1,), torch.int64), ArraySpec("layers.2.b", (2,), torch.int32))
                if self.kind.attention
                else ()
            ),
            snapshot_arrays=(
                *(
                    (
                        ArraySpec("layers.0.recurrent", (LANES,), torch.int64),
                        ArraySpec("layers.0.conv", (TAIL,), torch.int32),
                    )
                    if self.kind.recurrent
                    else ()
                ),
                ArraySpec(LAST_HIDDEN, (8,), torch.float32),
            ),
            window_arrays=(
                (ArraySpec("layers.3.w", (1,), torch.int64), ArraySpec("layers.4.v", (4,), torch.int32))
                if self.kind.window
                else ()
            ),
            window=WINDOW - 1 if self.kind.window else 0,
        )
        self.fingerprint = self.layout.fingerprint(f"oracle-{seed}", {"model_type": "oracle", "kind": kind})

    def forward(self, batch: Batch, pool: DevicePool) -> torch.Tensor:
        """Feed a batch. Returns hidden vectors, float32 [tokens, 8]: the bytes of a digest."""
        tokens = batch.token_ids.numpy().astype(np.uint64)
        out = np.empty((batch.num_tokens, 8), dtype=np.float32)
        for (first, last), sequence in zip(batch.bounds, batch.sequences, strict=True):
            fed = tokens[first:last]
            digest = self._feed(fed, sequence.table.numpy(), sequence.live_row, pool)
            if sequence.window is not None:
                digest = self._slide(digest, fed, len(sequence.table), sequence.window.numpy(), pool)
            out[first:last] = digest[:, None].view(np.uint8)
        return torch.from_numpy(out)

    def _feed(self, tokens: Words, table: NDArray[np.int64], live_row: int, pool: DevicePool) -> Words:
        """Digests after each of `tokens`, uint64 [tokens]; reads and writes the state of one sequence."""
        k, count, length = self._k, len(tokens), len(table)
        start = length - count if self.kind.attention else 0
        o = self._recurrent(tokens, live_row, pool) if self.kind.recurrent else np.zeros(count, dtype=np.uint64)
        if not self.kind.attention:
            return mix(o)
        places = np.arange(length, dtype=np.uint64)
        a_rows = pool.token_views["layers.1.a"].numpy()
        b_rows = pool.token_views["layers.2.b"].numpy()
        a_rows[table[start:], 0] = mix(o + tokens * k[7] + places[start:] * k[8]).view(np.int64)
        a = a_rows[table, 0].view(np.uint64)
        sums = np.cumsum(mix(a + places * k[9]), dtype=np.uint64)
        b_rows[table[start:]] = mix(sums[start:]).view(np.int32).reshape(count, 2)
        b = np.ascontiguousarray(b_rows[table]).view(np.uint64)[:, 0]
        return mix(o + np.cumsum(mix(b + places * k[10]), dtype=np.uint64)[start:])

    def _slide(self, d: Words, tokens: Words, length: int, window: NDArray[np.int64], pool: DevicePool) -> Words:
        """Digests after the layers with sliding windows. window: slots of the last rows, int64 [keys, pages]."""
        k, count = self._k, len(tokens)
        places = np.arange(length - len(window), length, dtype=np.uint64)
        (w_page, w_view), (v_page, v_view) = pool.window_views["layers.3.w"], pool.window_views["layers.4.v"]
        w_rows, v_rows = w_view.numpy(), v_view.numpy()
        w_rows[window[-count:, w_page], 0] = mix(d + tokens * k[11] + places[-count:] * k[12]).view(np.int64)
        w = w_rows[window[:, w_page], 0].view(np.uint64)
        e = mix(d + _sliding_sums(mix(w + places * k[13]), count))
        v_rows[window[-count:, v_page]] = np.stack([e, mix(e)], axis=1).view(np.int32)
        v = np.ascontiguousarray(v_rows[window[:, v_page]]).view(np.uint64)
        return mix(e + _sliding_sums(mix(v[:, 0] + v[:, 1] * k[14] + places * k[15]), count))

    def _recurrent(self, tokens: Words, live_row: int, pool: DevicePool) -> Words:
        k, count = self._k, len(tokens)
        if count >= len(self._decay):
            self._decay, self._growth = _powers(DECAY, count + 1), _powers(pow(DECAY, -1, 1 << 64), count + 1)
        tail = pool.live_views["layers.0.conv"].numpy()[live_row]
        h = pool.live_views["layers.0.recurrent"].numpy()[live_row].view(np.uint64)
        t = np.concatenate([tail.astype(np.uint64), tokens])
        c = mix(k[0] + t[3:] * k[1] + t[2:-1] * k[2] + t[1:-2] * k[3] + t[:-3] * k[4])
        inputs = mix(c[:, None] + self._lanes)
        grown = np.cumsum(inputs * self._growth[1 : count + 1, None], axis=0, dtype=np.uint64)
        states = (h + grown) * self._decay[1 : count + 1, None]
        h[:] = states[-1]
        tail[:] = t[-TAIL:].astype(np.int32)
        return mix(k[6] + (states * self._lanes).sum(axis=1, dtype=np.uint64))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores, float32 [n, vocab_size], whole numbers below 2**21. hidden: float32 [n, 8]."""
        digest = hidden.numpy().astype(np.uint8).view(np.uint64)
        scores = mix(digest + self._scores) >> np.uint64(SCORE_SHIFT)
        return torch.from_numpy(scores.astype(np.float32))


def make_oracle(name: str) -> Oracle:
    """The oracle called `oracle:KIND` or `oracle:KIND:SEED`; `oracle:` is a hybrid. Raises ModelError."""
    kind, _, seed = name.removeprefix(PREFIX).partition(":")
    kind = kind or "hybrid"
    if kind not in KINDS or not (seed or "0").isdecimal() or int(seed or "0") >= 1 << 63:
        raise ModelError(
            f"{name!r} is no oracle; say {PREFIX}KIND or {PREFIX}KIND:SEED, KIND one of {', '.join(KINDS)}."
        )
    return Oracle(kind, int(seed or "0"))

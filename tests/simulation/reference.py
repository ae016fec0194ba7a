"""What the oracle must say: its definition written out once more, token by token, in whole numbers of Python."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from holdover.models.oracle import DECAY, GOLDEN, KINDS, LANES, SCORE_SHIFT, VOCAB_SIZE, WINDOW

WORD = (1 << 64) - 1
State = tuple[
    int, tuple[int, ...], tuple[int, ...], int, int, tuple[tuple[int, int], ...], int
]  # position, tail, h, sums, what the last tokens add to windows, digest
REMEMBERED_EVERY = 16  # positions


def mix(x: int) -> int:
    x &= WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


class Reference:
    """One oracle's answers, with no pool, no tree and no tier."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.kind = KINDS[kind]
        self.k = [mix(seed + n * GOLDEN) for n in range(1, 17)]
        self.lanes = [mix((lane + 1) * self.k[5]) for lane in range(LANES)]
        self.start: State = (0, (0, 0, 0), (0,) * LANES, 0, 0, (), 0)
        self._known: dict[bytes, State] = {}
        self.token_after = lru_cache(maxsize=4096)(self._token_after)

    def feed(self, state: State, token: int) -> State:
        """The state after one more token."""
        position, tail, h, a_sum, b_sum, window, _ = state
        k, o = self.k, 0
        if self.kind.recurrent:
            c = mix(k[0] + token * k[1] + tail[2] * k[2] + tail[1] * k[3] + tail[0] * k[4])
            h = tuple((x * DECAY + mix(c + lane)) & WORD for x, lane in zip(h, self.lanes, strict=True))
            o = mix(k[6] + sum(x * lane for x, lane in zip(h, self.lanes, strict=True)))
        digest = mix(o)
        if self.kind.attention:
            a = mix(o + token * k[7] + position * k[8])
            a_sum = (a_sum + mix(a + position * k[9])) & WORD
            b = mix(mix(a_sum) + position * k[10])
            b_sum = (b_sum + b) & WORD
            digest = mix(o + b_sum)
        if self.kind.window:
            w = mix(digest + token * k[11] + position * k[12])
            window = (*window, (mix(w + position * k[13]), 0))
            e = mix(digest + sum(x for x, _ in window))
            second = mix(e + mix(e) * k[14] + position * k[15])
            window = (*window[:-1], (window[-1][0], second))
            digest = mix(e + sum(x for _, x in window))
            window = window[-(WINDOW - 1) :]
        return position + 1, (*tail[1:], token), h, a_sum, b_sum, window, digest

    def state_after(self, tokens: Sequence[int]) -> State:
        """The state after all of `tokens`."""
        packed = np.asarray(tokens, dtype="<u4").tobytes()
        known = len(tokens) // REMEMBERED_EVERY * REMEMBERED_EVERY
        while known and packed[: 4 * known] not in self._known:
            known -= REMEMBERED_EVERY
        state = self._known[packed[: 4 * known]] if known else self.start
        for position in range(known, len(tokens)):
            state = self.feed(state, tokens[position])
            if (position + 1) % REMEMBERED_EVERY == 0:
                self._known[packed[: 4 * (position + 1)]] = state
        return state

    def scores(self, digest: int) -> np.ndarray:
        """Scores of the next token, float32 [vocab_size]."""
        with np.errstate(over="ignore"):
            x = np.uint64(digest) + np.arange(VOCAB_SIZE, dtype=np.uint64) * np.uint64(GOLDEN)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return ((x ^ (x >> np.uint64(31))) >> np.uint64(SCORE_SHIFT)).astype(np.float32)

    def _token_after(self, digest: int) -> int:
        return int(self.scores(digest).argmax())

    def answer(self, prompt: Sequence[int], max_tokens: int, end_tokens: frozenset[int] = frozenset()) -> list[int]:
        """The greedy answer to `prompt`."""
        state, answer = self.state_after(prompt), list[int]()
        while True:
            answer.append(self.token_after(state[-1]))
            if len(answer) == max_tokens or answer[-1] in end_tokens:
                return answer
            state = self.feed(state, answer[-1])

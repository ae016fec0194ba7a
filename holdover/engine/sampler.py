"""Choosing the next token. Randomness is a function of (seed, choice, position), so it needs no state to be resumed."""

from dataclasses import dataclass, field

import numpy as np
import torch

from holdover.engine.messages import Sampling, TokenLogprob


@dataclass(slots=True)
class SamplerState:
    """What choosing depends on besides the logits. counts: how often each token was generated so far."""

    sampling: Sampling
    seed: int
    choice: int
    prompt: set[int] = field(default_factory=set)
    counts: dict[int, int] = field(default_factory=dict)
    generated: int = 0

    def count(self, token: int) -> None:
        """`token` was chosen."""
        self.generated += 1
        self.counts[token] = self.counts.get(token, 0) + 1

    @property
    def plain_greedy(self) -> bool:
        """Whether the token is simply the one with the highest logit."""
        s = self.sampling
        return (
            s.temperature == 0.0
            and s.repetition_penalty == 1.0
            and s.presence_penalty == 0.0
            and s.frequency_penalty == 0.0
            and s.logprobs is None
            and self.generated >= s.min_tokens
        )


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number for one token: Philox4x64 with key (seed, choice) and counter `position`; in [0, 1)."""
    key = np.array([seed & (2**64 - 1), choice], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def penalised(logits: torch.Tensor, state: SamplerState, banned: frozenset[int]) -> torch.Tensor:
    """Apply penalties to one row of logits, float32 [vocab_size]; returns a new row.

    presence and frequency penalties count generated tokens, as OpenAI documents them; the repetition penalty counts
    the prompt's too (Keskar et al., "CTRL", 2019). `banned` tokens can't be chosen.
    """
    sampling = state.sampling
    row = logits.clone()
    if state.counts and (sampling.presence_penalty or sampling.frequency_penalty):
        ids = torch.tensor(list(state.counts))
        times = torch.tensor(list(state.counts.values()), dtype=torch.float32)
        row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(state.prompt | state.counts.keys()))
        if len(seen):
            values = row[seen]
            row[seen] = torch.where(
                values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
            )
    if banned:
        row[torch.tensor(sorted(banned))] = float("-inf")
    return row


def restrict(probabilities: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep what top-k, top-p and min-p allow, each over the distribution that the one before left.

    probabilities: float32 [vocab_size]. Returns (token ids, probabilities) sorted from likely to unlikely; ties go to
    the lower id, and the probabilities sum to one.
    """
    kept, ids = probabilities.sort(descending=True, stable=True)
    if sampling.top_k is not None:
        kept = kept[: sampling.top_k]
        kept = kept / kept.sum()
    if sampling.top_p < 1.0:
        before = kept.cumsum(0) - kept
        kept = kept[: max(1, int((before < sampling.top_p).sum()))]
        kept = kept / kept.sum()
    if sampling.min_p > 0.0:
        kept = kept[: max(1, int((kept >= sampling.min_p * kept[0]).sum()))]
        kept = kept / kept.sum()
    return ids[: len(kept)], kept


def choose(logits: torch.Tensor, state: SamplerState, position: int, banned: frozenset[int]) -> int:
    """The token after `position` tokens. logits: float32 [vocab_size], penalised already."""
    sampling = state.sampling
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
    ids, kept = restrict(probabilities, sampling)
    point = uniform(state.seed, state.choice, position) * float(kept.sum())
    index = int(torch.searchsorted(kept.cumsum(0), point, right=True))
    return int(ids[min(index, len(ids) - 1)])


def sample(
    logits: torch.Tensor, states: list[SamplerState], positions: list[int], end_tokens: list[frozenset[int]]
) -> tuple[list[int], list[TokenLogprob | None]]:
    """Choose a token for each row. logits: float32 [rows, vocab_size]. end_tokens: banned until min_tokens are made."""
    best: list[int] = logits.argmax(dim=-1).tolist()
    reports: list[TokenLogprob | None] = [None] * len(best)
    for i, state in enumerate(states):
        if state.plain_greedy:
            continue
        banned = end_tokens[i] if state.generated < state.sampling.min_tokens else frozenset()
        row = penalised(logits[i], state, banned)
        best[i] = choose(row, state, positions[i], banned)
        if state.sampling.logprobs is not None:
            reports[i] = report(logits[i], best[i], state.sampling.logprobs)
    return best, reports


def report(logits: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Log-probabilities of the model's own distribution, before temperature and penalties."""
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = logprobs.topk(top) if top else (logprobs[:0], torch.empty(0))
    return TokenLogprob(token, float(logprobs[token]), [(int(i), float(v)) for i, v in zip(ids, values, strict=True)])

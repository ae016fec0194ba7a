"""Where snapshots are kept: pure functions of positions."""

from collections.abc import Iterable, Sequence
from math import log2

NEWEST_SNAPSHOTS_KEPT = 2
SUPERSEDED = 10.0  # a newer snapshot of the same chain makes one as little worth as saving 1/1024 of the tokens would


def prefill_stops(
    *, start: int, prompt_end: int, known: int, boundaries: Iterable[int], spacing: int, resumes_anywhere: bool
) -> list[int]:
    """Positions in `(start, prompt_end]` at which a prefill stops to keep a snapshot, ascending.

    `known` is how far the tree knows the prompt's tokens; where that is past `start`, it is a branch point. For
    models that can resume at any position with rows, only the prompt's end is kept (its last hidden vector).
    """
    if start >= prompt_end:
        return []
    stops = {prompt_end}
    if not resumes_anywhere:
        stops.update(range(start + spacing, prompt_end, spacing))
        stops.update(position for position in (known, *boundaries) if start < position < prompt_end)
    return sorted(stops)


def snapshots_to_drop(positions: Sequence[int]) -> set[int]:
    """Thin a chain's snapshots: which of `positions` (ascending) to drop.

    The newest two stay; of the older ones, one in each span of twice the length of the last, counted back from the
    newest: a change far back costs at most as much recompute again as it lies back.
    """
    drop: set[int] = set()
    if len(positions) <= NEWEST_SNAPSHOTS_KEPT:
        return drop
    newest = positions[-1]
    spans: set[int] = set()
    for position in positions[:-NEWEST_SNAPSHOTS_KEPT]:  # oldest of a span stays: it will stay so as the chain grows
        span = (newest - position).bit_length()
        if span in spans:
            drop.add(position)
        spans.add(span)
    return drop


def eviction_rank(*, last_used: int, saved_tokens: int, slots: int, horizon: int, superseded: bool) -> float:
    """How much something is worth keeping on the device; the least goes first.

    saved_tokens: of recompute that it saves, down to the next older position that can be resumed. slots: that it takes.
    horizon: how many uses lie between two uses of what is kept, roughly: the number of snapshots kept. What saves twice
    as many tokens for each slot may be one horizon older. superseded: a newer snapshot of the same chain is there.

    Rows alone save one token for each row: for models that resume anywhere, this is least recently used first.
    """
    worth = log2(max(1, saved_tokens) / max(1, slots)) - SUPERSEDED * superseded
    return last_used + horizon * worth


class ResponseReturns:
    """Learns whether generated tokens come back in the next turn, so that their state is kept only where they do.

    Chat templates that strip reasoning, and clients that edit answers, make generated state useless.
    """

    MIN_OBSERVED = 8
    KEEP_FROM = 0.1
    TRY_EVERY = 32  # responses: so that a change of clients is noticed

    def __init__(self) -> None:
        self._returned = 0.0
        self._observed = 0.0
        self._not_kept = 0

    def observe(self, returned: bool) -> None:
        """A turn has followed a kept response; `returned` if it went on along the generated tokens."""
        self._returned = 0.95 * self._returned + returned
        self._observed = 0.95 * self._observed + 1.0

    def keep_next(self) -> bool:
        """Whether to keep the state of the response that has just ended."""
        if self._observed < self.MIN_OBSERVED or self._returned / self._observed >= self.KEEP_FROM:
            return True
        self._not_kept = (self._not_kept + 1) % self.TRY_EVERY
        return self._not_kept == 0

"""Which sequences run, and how many tokens of each the next step feeds."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdover.engine.holdings import Holdings, Taken
from holdover.engine.sequence import Sequence, Status
from holdover.state.node import Match, common_length
from holdover.state.policy import prefill_stops
from holdover.store.jobs import LoadJob

LoadingPays = Callable[[Mapping[str, int], int, int], bool]  # (bytes by tier, tokens to compute, most in a step)


@dataclass(frozen=True, slots=True)
class Work:
    """Feed the next `num_tokens` tokens of a sequence; 0 if all are fed and only a token is to be chosen."""

    sequence: Sequence
    num_tokens: int


@dataclass(slots=True)
class Admission:
    """Sequences that left the waiting queue: to run at once, to wait for a load, or never to fit. no_room: the first
    that stays waits for room on the device."""

    admitted: list[tuple[Sequence, Match]]
    loads: list[LoadJob]
    impossible: list[Sequence]
    no_room: bool = False


class Scheduler:
    """First come, first served; running sequences before new ones; a prefix that is being computed is waited for."""

    def __init__(
        self, holdings: Holdings, max_batch_tokens: int, snapshot_spacing: int, loading_pays: LoadingPays
    ) -> None:
        self.holdings = holdings
        self.loading_pays = loading_pays
        self.num_not_loaded = 0  # tokens that were computed because loading them would have taken longer
        self.max_batch_tokens = max_batch_tokens
        self.snapshot_spacing = snapshot_spacing
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_runnable(self) -> bool:
        return bool(self.running or self.waiting)

    def admit(self) -> Admission:
        """Let waiting sequences in, in order, until there is no room. Those whose prefix another sequence is just
        computing or loading stay, and do not hold up those behind them."""
        result = Admission([], [], [])
        tree = self.holdings.tree
        stay: list[Sequence] = []
        while self.waiting:
            sequence = self.waiting.popleft()
            match = self._match(sequence)
            if self._wait_for_leader(sequence, match):
                stay.append(sequence)
                continue
            taken, job = self.holdings.take(sequence, match)
            if taken is Taken.BUSY:
                stay.append(sequence)
                continue
            if taken is Taken.NO_ROOM:
                result.no_room = True
                stay.append(sequence)
                break
            if taken is Taken.NEVER:
                result.impossible.append(sequence)
                continue
            result.admitted.append((sequence, match))
            sequence.stops = prefill_stops(
                start=sequence.position,
                prompt_end=sequence.prompt_end,
                known=match.known,
                boundaries=sequence.request.boundaries,
                spacing=self.snapshot_spacing,
                resumes_anywhere=tree.layout.resumes_anywhere,
            )
            if job is not None:
                sequence.status = Status.LOADING
                self.loading.append(sequence)
                result.loads.append(job)
            else:
                sequence.status = Status.RUNNING
                self.running.append(sequence)
        self.waiting.extendleft(reversed(stay))
        return result

    def _match(self, sequence: Sequence) -> Match:
        """From where to go on: the farthest position that is known, or where loading would take longer than computing
        from there, the farthest that needs no load."""
        tree, root = self.holdings.tree, self.holdings.tree.root(sequence.space)
        match = tree.match(root, sequence.known_tokens)
        to_load = self.holdings.to_load(match)
        if not to_load:
            return match
        here = tree.match(root, sequence.known_tokens, on_device=True)
        if sequence.loading_pays is None:
            tokens = match.position - here.position
            sequence.loading_pays = self.loading_pays(to_load, tokens, self.max_batch_tokens)
            self.num_not_loaded += 0 if sequence.loading_pays else tokens
        return match if sequence.loading_pays else here

    def _wait_for_leader(self, sequence: Sequence, match: Match) -> bool:
        """Whether a running sequence will soon have computed more of this one's prefix than is known. If so, ask it
        to leave its state where the two part."""
        for leader in (*self.running, *self.loading):
            if leader.space != sequence.space or leader.position >= leader.prompt_end:
                continue
            shared = common_length(leader.tokens[: leader.prompt_end], sequence.known_tokens)
            if shared <= match.position or leader.position >= shared:
                continue
            if shared not in leader.stops:
                leader.stops = sorted([*leader.stops, shared])
            return True
        return False

    def plan(self, preempt: Callable[[Sequence], None]) -> list[Work]:
        """The next step's work. Where a response can't grow, `preempt` is called for the sequence admitted last, one
        a step: it must save and give back what the sequence holds, and queue it again."""
        works: list[Work] = []
        budget = self.max_batch_tokens
        may_preempt = True
        for sequence in list(self.running):  # decode first: a long prefill must not stall running responses
            if sequence not in self.running or sequence.prefilling:
                continue
            if sequence.position == sequence.length:
                works.append(Work(sequence, 0))
                continue
            if budget <= 0:
                break
            if not self.holdings.grow(sequence) and may_preempt:
                may_preempt = False
                victim = self.running.pop()
                works = [work for work in works if work.sequence is not victim]
                self.num_preemptions += 1
                preempt(victim)
                if victim is sequence:
                    continue
            if self.holdings.grow(sequence):
                works.append(Work(sequence, 1))
                budget -= 1
        for sequence in self.running:
            if budget <= 0:
                break
            if sequence.prefilling:
                end = sequence.stops[0] if sequence.stops else sequence.length
                count = min(end - sequence.position, budget)
                works.append(Work(sequence, count))
                budget -= count
        return works

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended or was cancelled."""
        for place in (self.running, self.loading, self.waiting):
            if sequence in place:
                place.remove(sequence)

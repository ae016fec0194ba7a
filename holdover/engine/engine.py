"""The engine: one step after another of admit, plan, run, sample, publish, save. No clock, no sockets."""

from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np

from holdover.engine.counters import Counters, TierCounters
from holdover.engine.deferred import Saving
from holdover.engine.exchange import Exchange
from holdover.engine.holdings import Holdings
from holdover.engine.messages import Failed, Generate, Output, Statistics, Usage
from holdover.engine.rates import LoadOrCompute
from holdover.engine.runner import Runner
from holdover.engine.sampler import SamplerState, sample
from holdover.engine.scheduler import Scheduler, Work
from holdover.engine.sequence import Sequence, Status
from holdover.engine.text import NoText, StopStrings, TextDecoder
from holdover.engine.tool_times import Away, ToolTimes
from holdover.models.base import Model
from holdover.state.address import AddressChain, address_key, as_tokens
from holdover.state.integrity import check_integrity
from holdover.state.node import Match
from holdover.state.policy import ResponseReturns
from holdover.state.pool import DevicePool
from holdover.state.tree import PrefixTree
from holdover.store.jobs import Done, FindDone, FindJob, LoadDone, PrefixContext, PromoteDone, SaveDone
from holdover.store.queues import Store

Event = Output | Failed
FIND_FROM_TOKENS = 64
PROMOTE_AHEAD = 4  # waiting requests, the first ones
PROMOTE_SHARE = 16  # for who is expected soon, at most 1/16 of the nearest tier is filled


class Engine:
    """One model, one device pool, one prefix tree, one store.

    `new_decoder` makes a TextDecoder for each sequence. What is saved, and when, is the Exchange's to decide.
    """

    def __init__(
        self,
        model: Model,
        pool: DevicePool,
        tree: PrefixTree,
        store: Store,
        *,
        max_batch_tokens: int,
        snapshot_spacing: int,
        new_decoder: Callable[[], TextDecoder] = NoText,
        saving: Saving | None = None,
        audit: bool = False,
        find_from: int = FIND_FROM_TOKENS,
        claim_from: int | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.tree = tree
        self.store = store
        self.holdings = Holdings(tree, pool, max_batch_tokens, tuple(tier.name for tier in store.tiers))
        self.rates = LoadOrCompute()
        self.scheduler = Scheduler(self.holdings, max_batch_tokens, snapshot_spacing, self.rates.loading_pays)
        self.runner = Runner(model, pool)
        self.returns = ResponseReturns()
        self.tool_times = ToolTimes()
        self.counters = Counters(tiers={tier.name: TierCounters() for tier in store.tiers})
        self.exchange = Exchange(
            tree, store, self.counters, saving or Saving(), self.rates, find_from, claim_from, max_batch_tokens, audit
        )
        self._new_decoder = new_decoder
        self._sequences: dict[int, list[Sequence]] = {}
        self._asking_again: dict[FindJob, tuple[float, list[Sequence]]] = {}  # others compute what these need
        self._finding: dict[FindJob, list[Sequence]] = {}  # requests that wait to hear what shared tiers know
        self._events: list[Event] = []

    # Requests

    def submit(self, request: Generate) -> None:
        """Take in a request. Its outputs, or a Failed, come from later steps. One that is here already is ignored."""
        if request.id in self._sequences:
            return
        prompt = as_tokens(np.frombuffer(request.prompt, dtype="<u4"))
        sampling = request.sampling
        most = self.holdings.slots_for(len(prompt) + sampling.max_tokens)
        self.counters.requests += 1
        if most > self.pool.num_slots:
            self._fail(
                request.id,
                f"this request may need {most:,} slots and device memory holds {self.pool.num_slots:,}; "
                "ask for fewer tokens, or start the server with more --device-memory",
            )
            return
        key = address_key(self.model.fingerprint, request.salt)
        seed = sampling.seed if sampling.seed is not None else request.id
        sequences = []
        for index in range(request.n):
            tokens = np.empty(len(prompt) + sampling.max_tokens, dtype="<u4")
            tokens[: len(prompt)] = prompt
            chain = AddressChain(key, tokens)
            space = chain.address(0)
            sequences.append(
                Sequence(
                    request=request,
                    index=index,
                    arrival=self.counters.requests,
                    arrived=self.store.now(),
                    space=space,
                    context=PrefixContext(self.model.fingerprint, space, chain, tokens, request.session),
                    tokens=tokens,
                    prompt_end=len(prompt),
                    length=len(prompt),
                    sampler=SamplerState(
                        sampling,
                        seed,
                        index,
                        prompt=set(prompt.tolist()) if sampling.repetition_penalty != 1.0 else set(),
                    ),
                    decoder=self._new_decoder(),
                    stop_strings=StopStrings(sampling.stop),
                    end_tokens=frozenset(
                        (*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.model.eos_token_ids))
                    ),
                    usage=Usage(prompt_tokens=len(prompt)),
                )
            )
        self._sequences[request.id] = sequences
        self.counters.prompt_tokens += len(prompt)
        chain = AddressChain(key, prompt)
        asked = PrefixContext(self.model.fingerprint, chain.address(0), chain, prompt, request.session)
        if (job := self.exchange.look_for(asked, request.boundaries)) is not None:
            self._finding[job] = sequences
        else:
            self.scheduler.waiting.extend(sequences)

    def cancel(self, request_id: int) -> None:
        """The client has gone: free what the request holds. What it has published stays."""
        if request_id in self._sequences:
            self.counters.requests_cancelled += 1
        for sequence in self._sequences.pop(request_id, []):
            sequence.cancelled = True
            if sequence.status is not Status.LOADING:  # a load must end before its slots can be given to others
                self._end(sequence)

    def _fail(self, request_id: int, message: str, status: int = 400) -> None:
        self.counters.requests_failed += 1
        for sequence in self._sequences.pop(request_id, []):
            sequence.cancelled = True
            if sequence.status is not Status.LOADING:
                self._end(sequence)
        self._events.append(Failed(request_id, message, status, "does_not_fit"))

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.holdings.let_go(sequence)
        self._unclaim(sequence)
        sequence.status = Status.FINISHED

    def _unclaim(self, sequence: Sequence) -> None:
        if sequence.claimed is not None:
            self.exchange.unclaim(sequence.claimed)
            sequence.claimed = None

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now."""
        asking = self._finding or self._asking_again
        return bool(self.scheduler.running or self.scheduler.waiting or asking or self._events)

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, loads or saves."""
        return not (self.has_work or self.scheduler.loading) and self.exchange.idle

    def wakes_at(self) -> float | None:
        """When a step will have something to do even if nothing comes in, by the store's clock. None: never."""
        again = [moment for moment, _ in self._asking_again.values()]
        moments = (self.exchange.next_save(), self.tool_times.next_due(), *again)
        return min((moment for moment in moments if moment is not None), default=None)

    # Steps

    def step(self, done: list[Done]) -> tuple[list[Event], bool]:
        """One pass over everything. `done`: saves and loads that ended since the last step.

        Returns what to tell clients, and whether the model ran (if not, only new events can change anything).
        """
        for each in done:
            if isinstance(each, SaveDone):
                self.exchange.saved(each)
            elif isinstance(each, LoadDone):
                self._load_done(each)
            elif isinstance(each, PromoteDone):
                self.exchange.promoted(each)
            else:
                self._found(each)
        for job in [job for job in self._finding if self.store.overdue(job)]:
            self._go_on(job)
        now = self.store.now()
        for job in [job for job, (moment, _) in self._asking_again.items() if moment <= now]:
            self._ask_again(job)
        room_wanted = self._admit()
        works = self.scheduler.plan(self._preempt)
        if works:
            self._run(works)
        self.exchange.delete_forgotten()
        self.exchange.save_due(room_wanted)
        for away in self.tool_times.due(self.store.now()):
            self.exchange.promote(away.node, PROMOTE_SHARE)
        events, self._events = self._events, []
        return events, bool(works)

    def _admit(self) -> bool:
        """Let in who can come. Whether somebody waits for room."""
        if not self.scheduler.waiting:
            return False
        admission = self.scheduler.admit()
        for sequence in admission.impossible:
            self._fail(sequence.request.id, "device memory is too small for this request; start with more of it")
        for sequence, match in admission.admitted:
            if sequence.node is None:  # another answer to its request can never fit: the whole request has failed
                continue
            self._learn_from(sequence, match)
            self.exchange.used(sequence.node)
        for job in admission.loads:
            self.exchange.load(job)
        for sequence in list(islice(self.scheduler.waiting, PROMOTE_AHEAD)):
            if not sequence.promoted:  # while it waits, what it will load comes up the tiers
                sequence.promoted = True
                match = self.tree.match(self.tree.root(sequence.space), sequence.known_tokens)
                self.exchange.promote(match.node, PROMOTE_AHEAD)
        return admission.no_room

    def _learn_from(self, sequence: Sequence, match: Match) -> None:
        """Where a request resumes shows what was reused, and whether earlier responses come back."""
        if not sequence.started:
            sequence.started = True
            sequence.calls = self.tool_times.comes_back(match.node, sequence.arrived)
        if sequence.status is Status.RUNNING:
            self._count_reused(sequence, None)
        if match.followed_response is not None and not sequence.returns_checked:
            self.returns.observe(match.followed_response)
        sequence.returns_checked = True

    def _count_reused(self, sequence: Sequence, load: LoadDone | None) -> None:
        """All up to its position is in place, the last of it by `load`. A preempted request may come back farther on
        than it was, as others have gone on meanwhile; what it had computed itself before is not reused."""
        first, last = sequence.counted, min(sequence.position, sequence.prompt_end)
        if last <= first:
            return
        sequence.counted = last
        places = {} if load is None else load.tokens_by_tier(first, last)
        on_device = last - first - sum(places.values())
        self.counters.prompt_tokens_reused_device += on_device
        sequence.usage.cached_tokens += last - first
        reused = sequence.usage.reused
        for place, tokens in {"device": on_device, **places}.items():
            if tokens:
                reused[place] = reused.get(place, 0) + tokens

    def _run(self, works: list[Work]) -> None:
        for work in works:
            self.holdings.feed(work.sequence, work.num_tokens)
        began = self.store.now()
        logits = self.runner.run(works)
        self.counters.steps += 1
        ready: list[int] = []
        for i, work in enumerate(works):
            sequence = work.sequence
            computed = max(0, min(sequence.position + work.num_tokens, sequence.prompt_end) - sequence.position)
            self.holdings.advance(sequence, work.num_tokens)
            sequence.usage.computed += computed
            sequence.counted = max(sequence.counted, min(sequence.position, sequence.prompt_end))
            self.counters.prompt_tokens_computed += computed
            self._reached(sequence, work)
            if sequence.position == sequence.length:
                ready.append(i)
        if ready:
            self._choose(logits[ready] if len(ready) < len(works) else logits, [works[i].sequence for i in ready])
        if ready or self.pool.on_host:  # else the device may still be at work
            self.rates.computed(sum(work.num_tokens for work in works), self.store.now() - began)

    def _reached(self, sequence: Sequence, work: Work) -> None:
        """A sequence has come to a new position: publish and keep what the policy says."""
        position = sequence.position
        if sequence.stops and sequence.stops[0] == position:
            sequence.stops.pop(0)
            self.holdings.publish(sequence, generated=False)
            self._keep_snapshot(sequence, boundary=position in sequence.request.boundaries)
            if position == sequence.prompt_end:
                sequence.prompt_node = sequence.node
                self.exchange.save(sequence.node, sequence.context, at_once=sequence.claimed is not None)
                self._unclaim(sequence)
        elif self.tree.layout.resumes_anywhere and work.num_tokens and position <= sequence.prompt_end:
            self.holdings.publish(sequence, generated=False)

    def _keep_snapshot(self, sequence: Sequence, boundary: bool = False) -> None:
        if self.holdings.keep_snapshot(sequence, boundary):
            self.counters.snapshots_kept += 1
            assert sequence.node is not None
            self.exchange.delete(self.tree.thin(sequence.node))
        else:
            self.counters.snapshots_skipped += 1

    def _choose(self, logits: Any, sequences: list[Sequence]) -> None:
        tokens, reports = sample(
            logits,
            [each.sampler for each in sequences],
            [each.length for each in sequences],
            [each.end_tokens for each in sequences],
        )
        for sequence, token, report in zip(sequences, tokens, reports, strict=True):
            sampling = sequence.request.sampling
            sequence.append(token)
            sequence.sampler.count(token)
            sequence.usage.completion_tokens += 1
            self.counters.generated_tokens += 1
            ended = token in sequence.end_tokens and sequence.sampler.generated >= sampling.min_tokens
            text = "" if ended else sequence.stop_strings.add(sequence.decoder.add(token))
            reason: str | None = None
            if ended or sequence.stop_strings.found:
                reason = "stop"
            elif sequence.sampler.generated >= sampling.max_tokens:
                reason = "length"
            if reason is not None and not sequence.stop_strings.found:
                text += sequence.stop_strings.flush()
            output = Output(
                sequence.request.id,
                sequence.index,
                [token],
                text,
                [report] if report is not None else [],
                reason,
                sequence.usage if reason is not None else None,
            )
            self._events.append(output)
            if reason is not None:
                self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """The last token is chosen (and not fed): keep what the next turn may need."""
        if sequence.position > sequence.prompt_end and self.returns.keep_next():
            self.holdings.publish(sequence, generated=True, goes_on=False)
            self._keep_snapshot(sequence)
            self.exchange.save(sequence.node, sequence.context)
        if sequence.prompt_node is not None and sequence.node is not None and len(self.store.tiers) > 1:
            away = Away(sequence.node, self.store.now(), sequence.calls)
            self.tool_times.leaves(sequence.prompt_node, away)
        self._end(sequence)
        siblings = self._sequences[sequence.request.id]
        if all(each.status is Status.FINISHED for each in siblings):
            del self._sequences[sequence.request.id]
            self.counters.requests_finished += 1

    def _preempt(self, sequence: Sequence) -> None:
        """Give a running sequence's place to others: what it computed is published and saved, and it waits again."""
        self.holdings.publish(sequence, generated=sequence.position > sequence.prompt_end, goes_on=False)
        self._keep_snapshot(sequence)
        self.exchange.save(sequence.node, sequence.context)
        self.holdings.let_go(sequence)
        sequence.loading_pays = None
        sequence.status = Status.WAITING
        self.scheduler.waiting.appendleft(sequence)

    def _found(self, done: FindDone) -> None:
        self.exchange.found(done)
        sequences = [each for each in self._finding.get(done.job, ()) if not each.cancelled]
        if done.claimed is not None:
            if sequences:
                sequences[0].claimed = done.claimed
            else:  # nobody waits for it any more
                self.exchange.unclaim(done.claimed)
        again = self.exchange.ask_again_at(done)
        if sequences and again is not None:
            self._asking_again[done.job] = again, sequences
            del self._finding[done.job]
            return
        self._go_on(done.job)

    def _ask_again(self, before: FindJob) -> None:
        _, sequences = self._asking_again.pop(before)
        sequences = [each for each in sequences if not each.cancelled]
        if sequences:
            job = self.exchange.look_for(before.context, before.boundaries, before)
            if job is not None:
                self._finding[job] = sequences
            else:
                self.scheduler.waiting.extend(sequences)

    def _go_on(self, job: FindJob) -> None:
        """The request has heard what shared tiers know of its prompt, or has waited long enough."""
        sequences = self._finding.pop(job, [])
        self.scheduler.waiting.extend(each for each in sequences if not each.cancelled)

    def _load_done(self, done: LoadDone) -> None:
        sequence = done.job.owner
        assert isinstance(sequence, Sequence)
        self.scheduler.remove(sequence)
        sequence.loading_pays = None
        if done.ok:
            self.rates.loaded(done.bytes_by_tier, done.seconds)
            self.holdings.loaded(sequence, done.job)
            self._count_reused(sequence, done)
            sequence.status = Status.RUNNING
            self.scheduler.running.append(sequence)
        else:
            self.holdings.load_failed(sequence, done.job)
            sequence.status = Status.WAITING
            self.scheduler.waiting.appendleft(sequence)
        self.exchange.loaded(done)
        if sequence.cancelled:
            self._end(sequence)

    # Reporting

    def statistics(self, request_id: int) -> Statistics:
        """Counters and gauges of this moment."""
        counters = asdict(self.counters)
        counters.pop("tiers")
        counters["preemptions"] = self.scheduler.num_preemptions
        counters["tokens_computed_not_loaded"] = self.scheduler.num_not_loaded
        counters["tokens_evicted_from_device"] = self.tree.num_evicted_tokens
        gauges: dict[str, float] = {
            "requests_running": len(self.scheduler.running),
            "requests_waiting": len(self.scheduler.waiting),
            "requests_loading": len(self.scheduler.loading),
            "saves_under_way": self.exchange.saves_under_way,
            "turns_to_save": len(self.exchange.deferred),
            "device_budget_bytes": self.pool.budget_bytes,
            "device_used_bytes": self.pool.num_used * self.pool.slot_bytes + self.pool.live.numel(),
            "device_peak_bytes": self.pool.peak_used * self.pool.slot_bytes + self.pool.live.numel(),
            "device_live_bytes": self.pool.live.numel(),
            "leases": self.tree.num_leases(),
        }
        return Statistics(request_id, {k: float(v) for k, v in counters.items()}, gauges, self.exchange.by_tier())

    def check_integrity(self) -> None:
        """Raise AssertionError if state has been lost, mixed up or leaked."""
        check_integrity(self.tree, self.holdings.held_slots())

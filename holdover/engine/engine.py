"""The engine: one step after another of admit, plan, run, sample, publish, save. No clock, no sockets."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np

from holdover.engine.counters import Counters, TierCounters
from holdover.engine.holdings import Holdings
from holdover.engine.messages import Failed, Generate, Output, Statistics, Usage
from holdover.engine.runner import Runner
from holdover.engine.sampler import SamplerState, sample
from holdover.engine.scheduler import Scheduler, Work
from holdover.engine.sequence import Sequence, Status
from holdover.engine.text import NoText, StopStrings, TextDecoder
from holdover.models.base import Model
from holdover.state.address import AddressChain, Tokens, address_key, as_tokens
from holdover.state.integrity import check_integrity
from holdover.state.node import Match, Node, Saved, path_to
from holdover.state.policy import ResponseReturns
from holdover.state.pool import DevicePool
from holdover.state.segment import Kind, state_bytes
from holdover.state.tree import PrefixTree
from holdover.store.audit import TierAudit
from holdover.store.jobs import (
    Change,
    Done,
    FindDone,
    FindJob,
    Found,
    LoadDone,
    PrefixContext,
    PromoteDone,
    PromoteJob,
    SaveDone,
    SaveJob,
    TierChange,
)
from holdover.store.planning import SavePlanner, plan_delta
from holdover.store.queues import Store

log = logging.getLogger(__name__)
Event = Output | Failed
FIND_FROM_TOKENS = 64
PROMOTE_AHEAD = 4  # waiting requests, the first ones
MOST_AGAIN = 3  # times that a save is repeated which came before its parent


class Engine:
    """One model, one device pool, one prefix tree, one store.

    `new_decoder` makes a TextDecoder for each sequence. `plan_saves` decides what a turn saves. With `audit`, copies
    of each prefix position in each tier are counted. Shared tiers are asked about a prompt of which at least
    `find_from` tokens would have to be computed.
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
        plan_saves: SavePlanner = plan_delta,
        audit: bool = False,
        find_from: int = FIND_FROM_TOKENS,
    ) -> None:
        self.model = model
        self.pool = pool
        self.tree = tree
        self.store = store
        self.holdings = Holdings(tree, pool, max_batch_tokens)
        self.scheduler = Scheduler(self.holdings, max_batch_tokens, snapshot_spacing)
        self.runner = Runner(model, pool)
        self.returns = ResponseReturns()
        self.counters = Counters(tiers={tier.name: TierCounters() for tier in store.tiers})
        self.audits = {tier.name: TierAudit() for tier in store.tiers} if audit else {}
        self._new_decoder = new_decoder
        self._plan_saves = plan_saves
        self._sequences: dict[int, list[Sequence]] = {}
        self._find_from = find_from
        self._finding: dict[FindJob, list[Sequence]] = {}  # requests that wait to hear what shared tiers know
        self._events: list[Event] = []
        self._saves_under_way = 0
        self._promotions_under_way = 0

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
            sequences.append(
                Sequence(
                    request=request,
                    index=index,
                    arrival=self.counters.requests,
                    space=chain.address(0),
                    chain=chain,
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
        job = self._find_job(request, prompt, AddressChain(key, prompt)) if self.store.shared_tiers else None
        if job is not None and self.store.find(job):
            self._finding[job] = sequences
        else:
            self.scheduler.waiting.extend(sequences)

    def _find_job(self, request: Generate, prompt: Tokens, chain: AddressChain) -> FindJob | None:
        """What to ask the shared tiers about a prompt; None if there is too little to gain."""
        root = self.tree.root(chain.address(0))
        resume = self.tree.match(root, prompt).position
        if len(prompt) - resume < self._find_from:
            return None
        known = {tier.name: self.tree.covered_by(root, prompt, tier.name) for tier in self.store.shared_tiers}
        boundaries = [each for each in request.boundaries if 0 < each <= len(prompt)]
        context = PrefixContext(self.model.fingerprint, root.space, chain, prompt, request.session)
        return FindJob(context, known, resume, boundaries)

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
        sequence.status = Status.FINISHED

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._finding or self._events)

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, loads or saves."""
        under_way = self._saves_under_way or self._promotions_under_way
        return not (self.has_work or self.scheduler.loading or under_way)

    # Steps

    def step(self, done: list[Done]) -> tuple[list[Event], bool]:
        """One pass over everything. `done`: saves and loads that ended since the last step.

        Returns what to tell clients, and whether the model ran (if not, only new events can change anything).
        """
        for each in done:
            if isinstance(each, SaveDone):
                self._save_done(each)
            elif isinstance(each, LoadDone):
                self._load_done(each)
            elif isinstance(each, PromoteDone):
                self._promote_done(each)
            else:
                self._find_done(each)
        for job in [job for job in self._finding if self.store.overdue(job)]:
            self._go_on(job)
        self._admit()
        works = self.scheduler.plan(self._preempt)
        if works:
            self._run(works)
        self._delete(self.tree.saved.take_forgotten())
        events, self._events = self._events, []
        return events, bool(works)

    def _admit(self) -> None:
        if not self.scheduler.waiting:
            return
        admission = self.scheduler.admit()
        for sequence in admission.impossible:
            self._fail(sequence.request.id, "device memory is too small for this request; start with more of it")
        for sequence, match in admission.admitted:
            if sequence.node is None:  # another answer to its request can never fit: the whole request has failed
                continue
            self._learn_from(sequence, match)
            if self.store.tiers:
                path = path_to(sequence.node)[::-1]
                names = [
                    saved.name for each in path for saved in (each.snapshot, *each.windows_saved, each.rows)
                    if saved is not None
                ]  # fmt: skip
                self.store.touch(names)
        for job in admission.loads:
            for saved in job.segments:  # it may be promoted: until that is known, nobody saves the same state
                saved.pending += 1
            self.store.load(job)
        if len(self.store.tiers) > 1:
            for sequence in list(islice(self.scheduler.waiting, PROMOTE_AHEAD)):
                self._promote(sequence)

    def _promote(self, sequence: Sequence) -> None:
        """While a request waits for room on the device, what it will load comes up the tiers."""
        if sequence.promoted:
            return
        sequence.promoted = True
        node = self.tree.match(self.tree.root(sequence.space), sequence.known_tokens).node
        nearest, layout = self.store.tiers[0], self.tree.layout
        lacking: dict[Saved, None] = {}
        for each in path_to(node):
            windows = (part[0] for part in each.window_to_load(layout.window_first(node.end)))
            for saved in (each.rows if each.slots is None else None, *windows):
                if saved is not None and saved.tiers and nearest.name not in saved.tiers:
                    lacking[saved] = None
        snapshot = node.snapshot if node.snapshot_slots is None else None
        if snapshot is not None and snapshot.tiers and nearest.name not in snapshot.tiers:
            lacking[snapshot] = None
        nbytes = sum(max(1, saved.end - saved.start) * state_bytes(layout, saved.kind) for saved in lacking)
        if not lacking or nbytes * PROMOTE_AHEAD > nearest.budget_bytes:  # it would drive out what others wait for
            return
        for saved in lacking:
            saved.pending += 1
        self._promotions_under_way += 1
        self.store.promote(PromoteJob(list(lacking), sequence))

    def _promote_done(self, done: PromoteDone) -> None:
        job, saved_segments = done.job, self.tree.saved
        assert isinstance(job.owner, Sequence)
        self._promotions_under_way -= 1
        by_name = {saved.name: saved for saved in job.segments}
        for saved in job.segments:
            saved.pending -= 1
        for change in job.changes:
            known = saved_segments.find(change.name)
            if change.change is not Change.PROMOTED or known is None or known is by_name[change.name]:
                self._tier_changed(change, job.owner)
        for saved in job.segments:
            if saved_segments.find(saved.name) is saved:
                self.tree.lost(saved.name, "")  # if it went from its last tier meanwhile

    def _learn_from(self, sequence: Sequence, match: Match) -> None:
        """Where a request resumes shows what was reused, and whether earlier responses come back."""
        if not sequence.started:
            sequence.started = True
            sequence.usage.cached_tokens = min(sequence.position, sequence.prompt_end)
            loaded = 0
            if sequence.status is Status.LOADING and sequence.node is not None:
                lacking = (each for each in path_to(sequence.node) if each.slots is None)
                loaded = sum(len(each.tokens) for each in lacking)
                sequence.first_load = True
            on_device = sequence.usage.cached_tokens - loaded
            if on_device:
                sequence.usage.reused["device"] = on_device
            self.counters.prompt_tokens_reused_device += on_device
        if match.followed_response is not None and not sequence.returns_checked:
            self.returns.observe(match.followed_response)
        sequence.returns_checked = True

    def _run(self, works: list[Work]) -> None:
        for work in works:
            self.holdings.feed(work.sequence, work.num_tokens)
        logits = self.runner.run(works)
        self.counters.steps += 1
        ready: list[int] = []
        for i, work in enumerate(works):
            sequence = work.sequence
            computed = max(0, min(sequence.position + work.num_tokens, sequence.prompt_end) - sequence.position)
            self.holdings.advance(sequence, work.num_tokens)
            sequence.usage.computed += computed
            self.counters.prompt_tokens_computed += computed
            self._reached(sequence, work)
            if sequence.position == sequence.length:
                ready.append(i)
        if ready:
            self._choose(logits[ready] if len(ready) < len(works) else logits, [works[i].sequence for i in ready])

    def _reached(self, sequence: Sequence, work: Work) -> None:
        """A sequence has come to a new position: publish and keep what the policy says."""
        position = sequence.position
        if sequence.stops and sequence.stops[0] == position:
            sequence.stops.pop(0)
            self.holdings.publish(sequence, generated=False)
            self._keep_snapshot(sequence, boundary=position in sequence.request.boundaries)
            if position == sequence.prompt_end:
                self._save(sequence)
        elif self.tree.layout.resumes_anywhere and work.num_tokens and position <= sequence.prompt_end:
            self.holdings.publish(sequence, generated=False)

    def _keep_snapshot(self, sequence: Sequence, boundary: bool = False) -> None:
        if self.holdings.keep_snapshot(sequence, boundary):
            self.counters.snapshots_kept += 1
            assert sequence.node is not None
            self._delete(self.tree.thin(sequence.node))
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
            self._save(sequence)
        self._end(sequence)
        siblings = self._sequences[sequence.request.id]
        if all(each.status is Status.FINISHED for each in siblings):
            del self._sequences[sequence.request.id]
            self.counters.requests_finished += 1

    def _preempt(self, sequence: Sequence) -> None:
        """Give a running sequence's place to others: what it computed is published and saved, and it waits again."""
        self.holdings.publish(sequence, generated=sequence.position > sequence.prompt_end, goes_on=False)
        self._keep_snapshot(sequence)
        self._save(sequence)
        self.holdings.let_go(sequence)
        sequence.status = Status.WAITING
        self.scheduler.waiting.appendleft(sequence)

    # Finding, saving and loading

    def _find_done(self, done: FindDone) -> None:
        """What shared tiers know of a prompt joins the tree, however late it comes."""
        job = done.job
        self.store.found(job)
        for found in done.found:
            self._learn(found, self.tree.root(job.context.space), job.context.tokens)
        self._go_on(job)

    def _go_on(self, job: FindJob) -> None:
        sequences = self._finding.pop(job, [])
        self.scheduler.waiting.extend(each for each in sequences if not each.cancelled)

    def _learn(self, found: Found, root: Node, tokens: Tokens) -> None:
        """A tier keeps a segment of this prefix that another engine saved, or this one before a restart."""
        header = found.header
        saved = Saved(header.kind, header.address, header.start, header.end, header.tip)
        tree = self.tree
        if header.kind is Kind.ROWS:
            parent = tree.node_ending_at(root, tokens, header.start)
            if parent is not None and tree.graft(parent, found.tokens, saved, found.tier) is not None:
                self.counters.tiers[found.tier].segments_found += 1
            return
        node = tree.node_ending_at(root, np.concatenate([tokens[: header.start], found.tokens]), header.end)
        if node is not None and tree.learn(node, saved, found.tier):
            self.counters.tiers[found.tier].segments_found += 1

    def _delete(self, segments: list[Saved]) -> None:
        for saved in segments:
            self._delete_from(saved.name, saved.tiers | saved.unreachable)

    def _delete_from(self, name: str, tiers: set[str]) -> None:
        self.store.delete(name, tiers)
        for tier in tiers & self.audits.keys():
            self.audits[tier].removed(name)

    def _kept(self, name: str, tier: str) -> None:
        if not self.tree.saved.kept(name, tier):  # it was forgotten while the copy was under way
            self._delete_from(name, {tier})

    def _save(self, sequence: Sequence) -> None:
        self._delete(self.tree.saved.take_forgotten())  # first: what is saved now may go by the same name
        if not self.store.tiers or sequence.node is None:
            return
        context = PrefixContext(
            self.model.fingerprint, sequence.space, sequence.chain, sequence.tokens, sequence.request.session
        )
        self._save_path(sequence.node, context)

    def _save_path(self, node: Node, context: PrefixContext) -> None:
        for job in self._plan_saves(self.tree, node, context):
            self._submit(job)

    def _submit(self, job: SaveJob) -> None:
        self.tree.lease(job.node)
        if job.header.kind is Kind.SNAPSHOT:
            self.tree.lease_snapshot(job.node)
        self._saves_under_way += 1
        self.store.save(job)

    def _take_over(self, job: SaveJob, other: Found) -> None:
        """Another engine has saved this prefix, cut elsewhere: its segment counts, and what it lacks is saved."""
        self.tree.saved.drop(job.saved)
        self._learn(other, self.tree.root(job.context.space), job.context.tokens)
        if self.tree.saved.find(other.header.name) is not None:
            self._delete(self.tree.saved.take_forgotten())
            self._save_path(job.node, job.context)

    def _save_done(self, done: SaveDone) -> None:
        job = done.job
        self._saves_under_way -= 1
        job.saved.pending -= 1
        if done.other is not None and not job.saved.tiers:
            self._take_over(job, done.other)
        for name, tip, tier in done.stale:
            parent = self.tree.saved.find(name)
            if parent is None:
                continue
            current = self.tree.saved.find(job.saved.name) is job.saved
            if parent.tip == tip and parent.pending and current and job.again < MOST_AGAIN:
                job.again += 1  # its parent, saved anew after another's cut was taken over, comes after it: once more
                self._submit(job)
                break  # to all tiers at once
            if parent.tip == tip:
                self._forget(name, tier)
            elif not done.kept and current:  # it goes on from another now
                self.tree.saved.drop(job.saved)
                self._save_path(job.node, job.context)
        if job.header.kind is Kind.SNAPSHOT:
            self.tree.release_snapshot(job.node)
        self.tree.release(job.node)
        for tier, nbytes in done.kept.items():
            self._kept(job.saved.name, tier)
            if not nbytes:  # its books said that it was there: nobody has asked the tier itself
                continue
            self.tree.saved.reachable(tier)
            counters = self.counters.tiers[tier]
            counters.segments_saved += 1
            counters.bytes_saved += nbytes
            new_bytes = done.state_bytes
            if tier in self.audits:
                new_positions = self.audits[tier].added(job.saved, job.prefix, job.header.space)
                new_bytes = new_positions * state_bytes(self.tree.layout, job.header.kind)
            counters.bytes_new_state += new_bytes
        for name, tier in done.evicted:
            self._evicted(name, tier)
        if not done.kept:
            self.tree.lost(job.saved.name, "")

    def _forget(self, name: str, tier: str) -> None:
        self.tree.lost(name, tier)
        if tier in self.audits:
            self.audits[tier].removed(name)

    def _evicted(self, name: str, tier: str) -> None:
        self.counters.tiers[tier].segments_evicted += 1
        if not self.store.has(name, tier):  # saving and loading report apart: it may have come back since
            self._forget(name, tier)

    def _load_done(self, done: LoadDone) -> None:
        sequence = done.job.owner
        assert isinstance(sequence, Sequence)
        self.scheduler.remove(sequence)
        for saved in done.job.segments:
            saved.pending -= 1
        if done.ok:
            self.holdings.loaded(sequence, done.job)
            for tier, tokens in done.tokens_by_tier.items():
                self.counters.tiers[tier].tokens_loaded += tokens
                if not sequence.first_load:  # it was preempted and comes back: the request reused nothing more
                    continue
                sequence.usage.reused[tier] = sequence.usage.reused.get(tier, 0) + tokens
            for tier, nbytes in done.bytes_by_tier.items():
                self.counters.tiers[tier].bytes_loaded += nbytes
                self.tree.saved.reachable(tier)
            for part in done.job.parts:
                part.saved.failures = 0
            sequence.first_load = False
            sequence.status = Status.RUNNING
            self.scheduler.running.append(sequence)
        else:
            self.counters.loads_failed += 1
            self.holdings.load_failed(sequence, done.job)
            if sequence.first_load:
                sequence.usage.cached_tokens, sequence.usage.reused, sequence.started = 0, {}, False
                sequence.first_load = False
            sequence.status = Status.WAITING
            self.scheduler.waiting.appendleft(sequence)
        for change in done.job.changes:
            self._tier_changed(change, sequence)
        for saved in done.job.segments:
            self.tree.lost(saved.name, "")  # if it went from its last tier meanwhile
        if sequence.cancelled:
            self._end(sequence)

    def _tier_changed(self, change: TierChange, sequence: Sequence) -> None:
        counters = self.counters.tiers[change.tier]
        if change.change is Change.EVICTED:
            self._evicted(change.name, change.tier)
            return
        if change.change is Change.UNREACHABLE:
            counters.segments_unreachable += 1
            self.tree.unreachable(change.name, change.tier)
            return
        if change.change is Change.LOST:
            counters.segments_lost += 1
            self._forget(change.name, change.tier)
            return
        self._kept(change.name, change.tier)
        if change.nbytes:
            counters.segments_promoted += 1
            counters.bytes_promoted += change.nbytes
            saved = self.tree.saved.find(change.name)
            if change.tier in self.audits and saved is not None:
                self.audits[change.tier].added(saved, sequence.tokens, sequence.space)

    # Reporting

    def statistics(self, request_id: int) -> Statistics:
        """Counters and gauges of this moment."""
        counters = asdict(self.counters)
        counters.pop("tiers")
        counters["preemptions"] = self.scheduler.num_preemptions
        counters["tokens_evicted_from_device"] = self.tree.num_evicted_tokens
        by_tier: dict[str, dict[str, float]] = {}
        for tier in self.store.tiers:
            by_tier[tier.name] = {
                **asdict(self.counters.tiers[tier.name]),
                "used_bytes": tier.used_bytes(),
                "budget_bytes": tier.budget_bytes,
                "opened": float(tier.opened),
                "faults": self.store.faults[tier.name],
                "damaged": self.store.damaged[tier.name],
            }
            if tier.name in self.audits:
                by_tier[tier.name]["max_copies"] = self.audits[tier.name].max_copies
        gauges: dict[str, float] = {
            "requests_running": len(self.scheduler.running),
            "requests_waiting": len(self.scheduler.waiting),
            "requests_loading": len(self.scheduler.loading),
            "saves_under_way": self._saves_under_way,
            "device_budget_bytes": self.pool.budget_bytes,
            "device_used_bytes": self.pool.num_used * self.pool.slot_bytes + self.pool.live.numel(),
            "device_peak_bytes": self.pool.peak_used * self.pool.slot_bytes + self.pool.live.numel(),
            "device_live_bytes": self.pool.live.numel(),
            "leases": self.tree.num_leases(),
        }
        return Statistics(request_id, {k: float(v) for k, v in counters.items()}, gauges, by_tier)

    def check_integrity(self) -> None:
        """Raise AssertionError if state has been lost, mixed up or leaked."""
        check_integrity(self.tree, self.holdings.held_slots())

"""What an engine's tree gives to its tiers and takes from them: finding, saving, promoting, and the books of it."""

from collections.abc import Iterable
from dataclasses import asdict

import numpy as np

from holdover.config import SaveMode
from holdover.engine.counters import Counters
from holdover.engine.deferred import Deferred, Held, Saving
from holdover.engine.rates import LoadOrCompute
from holdover.state.node import Node, Saved, path_to
from holdover.state.segment import Kind, link_tip, state_bytes
from holdover.state.tree import PrefixTree
from holdover.store.audit import TierAudit
from holdover.store.jobs import (
    Change,
    Claimed,
    FindDone,
    FindJob,
    Found,
    LoadDone,
    LoadJob,
    PrefixContext,
    PromoteDone,
    PromoteJob,
    SaveDone,
    SaveJob,
    TierChange,
)
from holdover.store.queues import Store

CLAIM_SECONDS = 1.0  # what takes longer to compute is told to other engines
CLAIM_TOKENS = 4096  # while it is not known how long that takes
ASK_AGAIN_SECONDS = 0.2  # for what another engine is computing
UNKNOWN_SECONDS = 10.0  # that it is waited for, while it is not known how long computing it would take here
MOST_AGAIN = 3  # times that a save is repeated which came before its parent


class Exchange:
    """One tree's dealings with one store. With `audit`, copies of each prefix position in each tier are counted.

    Shared tiers are asked about a prompt of which at least `find_from` tokens would have to be computed. Where at
    least `claim_from` of them are kept nowhere, engines tell each other who computes them; None: as many as take a
    second.
    """

    def __init__(
        self,
        tree: PrefixTree,
        store: Store,
        counters: Counters,
        saving: Saving,
        rates: LoadOrCompute,
        find_from: int,
        claim_from: int | None,
        most_at_once: int,
        audit: bool,
    ) -> None:
        self.tree = tree
        self.store = store
        self.audits = {tier.name: TierAudit() for tier in store.tiers} if audit else {}
        self.deferred = Deferred(tree, saving)
        self.saves_under_way = 0
        self.promotions_under_way = 0
        self._counters = counters
        self._saving = saving
        self._rates = rates
        self._find_from = find_from
        self._claim_from = claim_from
        self._most_at_once = most_at_once
        self._backlog_bytes = 0

    # Finding

    def look_for(
        self, context: PrefixContext, boundaries: Iterable[int], before: FindJob | None = None
    ) -> FindJob | None:
        """Ask the shared tiers what they know of a prompt. None if there is too little to gain, or they are silent.
        before: when it is asked about again."""
        if not self.store.shared_tiers:
            return None
        tree, prompt = self.tree, context.tokens
        root = tree.root(context.space)
        resume = tree.match(root, prompt).position
        if len(prompt) - resume < self._find_from:
            return None
        known = {tier.name: tree.covered_by(root, prompt, tier.name) for tier in self.store.shared_tiers}
        job = FindJob(
            context, known, resume, [each for each in boundaries if 0 < each <= len(prompt)],
            claim_from=self._tokens_to_claim() if before is None else before.claim_from,
            since=self.store.now() if before is None else before.since,
            awaited=0 if before is None else before.awaited,
        )  # fmt: skip
        return job if self.store.find(job) else None

    def _tokens_to_claim(self) -> int:
        if self._claim_from is not None:
            return self._claim_from
        seconds = self._rates.seconds_to_compute(CLAIM_TOKENS, self._most_at_once)
        return CLAIM_TOKENS if not seconds else int(CLAIM_TOKENS * CLAIM_SECONDS / seconds)

    def found(self, done: FindDone) -> None:
        """What shared tiers know of a prompt joins the tree, however late it comes."""
        self.store.found(done.job)
        for found in done.found:
            self._learn(found, done.job.context)

    def ask_again_at(self, done: FindDone) -> float | None:
        """When to ask again, as another engine is computing what a request needs; None if it is not waited for: no
        longer than computing it here would take, and not at all if loading it would take longer than that."""
        if not done.elsewhere:
            return None
        tiers = [tier.name for tier in self.store.shared_tiers if tier.claims]
        done.job.awaited = max(done.job.awaited, done.elsewhere)  # part of it may be here by now
        nbytes = done.elsewhere * self.tree.layout.bytes_per_token + self.tree.layout.bytes_per_snapshot
        seconds = self._rates.seconds_to_compute(done.elsewhere, self._most_at_once)
        load = self._rates.seconds_to_load({tiers[0]: nbytes})
        if seconds is not None and load is not None and load > seconds:
            return None
        now = self.store.now()
        again = now + ASK_AGAIN_SECONDS
        whole = self._rates.seconds_to_compute(done.job.awaited, self._most_at_once)
        limit = UNKNOWN_SECONDS if whole is None else whole + CLAIM_SECONDS
        return again if again < done.job.since + limit else None

    def unclaim(self, claimed: Claimed) -> None:
        """What this engine has said it would compute is saved, after what is to be saved now, or will not be."""
        self.store.unclaim(claimed)

    def _learn(self, found: Found, context: PrefixContext) -> None:
        """A tier keeps a segment of this prefix that another engine saved, or this one before a restart."""
        header, tree, tokens = found.header, self.tree, context.tokens
        root = tree.root(context.space)
        saved = Saved(header.kind, header.address, header.start, header.end, header.tip, header.rows_tip)
        if header.kind is Kind.ROWS:
            parent = tree.node_ending_at(root, tokens, header.start)
            if parent is not None and tree.graft(parent, found.tokens, saved, found.tier) is not None:
                self._counters.tiers[found.tier].segments_found += 1
            return
        node = tree.node_ending_at(root, np.concatenate([tokens[: header.start], found.tokens]), header.end)
        if node is not None and tree.learn(node, saved, found.tier):
            self._counters.tiers[found.tier].segments_found += 1
            self.delete_forgotten()

    # Saving

    def save(self, node: Node | None, context: PrefixContext, at_once: bool = False) -> None:
        """A turn has ended at `node`, or stops there for a while: what the tiers lack of its path is to be saved.
        at_once: others wait for it."""
        self.delete_forgotten()  # first: what is saved now may go by the same name
        if not self.store.tiers or node is None:
            return
        if at_once or self._saving.mode is SaveMode.EAGER:
            self._save_path(node, context)
            return
        self.deferred.hold(node, context, self.store.now())
        self.save_due(wanted=False)

    def save_due(self, wanted: bool) -> None:
        """Save what has waited long enough. wanted: a request waits for room on the device."""
        while (held := self.deferred.due(self.store.now(), self._backlog_bytes, wanted)) is not None:
            self._save_held(held)

    def next_save(self) -> float | None:
        """When `save_due` will have something to save if nothing else happens."""
        return None if self._backlog_bytes >= self._saving.backlog_bytes else self.deferred.next_due()

    def save_all(self) -> None:
        """Save everything that waits: the engine ends."""
        while (held := self.deferred.oldest()) is not None:
            self._save_held(held)

    def _save_held(self, held: Held) -> None:
        self.delete_forgotten()
        self._save_path(held.node, held.context)
        self.deferred.release(held)

    def _save_path(self, node: Node, context: PrefixContext) -> None:
        for job in self._saving.plan(self.tree, node, context):
            self._submit(job)

    def _submit(self, job: SaveJob) -> None:
        self.tree.lease(job.node)
        if job.header.kind is Kind.SNAPSHOT:
            self.tree.lease_snapshot(job.node)
        self.saves_under_way += 1
        self._backlog_bytes += self._nbytes(job.saved)
        self.store.save(job)

    def _nbytes(self, saved: Saved) -> int:
        return max(1, saved.end - saved.start) * state_bytes(self.tree.layout, saved.kind)

    def saved(self, done: SaveDone) -> None:
        """A save is over."""
        job = done.job
        self.saves_under_way -= 1
        self._backlog_bytes -= self._nbytes(job.saved)
        job.saved.pending -= 1
        if done.other is not None and not job.saved.tiers:
            self._take_over(job, done.other)
        for name, tip, tier in done.stale:
            parent = self.tree.saved.find(name)
            if parent is None:
                continue
            current = self.tree.saved.find(job.saved.name) is job.saved
            as_planned = link_tip(parent.tip, parent.rows_tip).hex() == tip
            if as_planned and parent.pending and current and job.again < MOST_AGAIN:
                job.again += 1  # its parent, saved anew after another's cut was taken over, comes after it: once more
                self._submit(job)
                break  # to all tiers at once
            if as_planned:
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
            counters = self._counters.tiers[tier]
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

    def _take_over(self, job: SaveJob, other: Found) -> None:
        """Another engine has saved this prefix, cut elsewhere: its segment counts, and what it lacks is saved."""
        self.tree.saved.drop(job.saved)
        self._learn(other, job.context)
        if self.tree.saved.find(other.header.name) is not None:
            self.delete_forgotten()
            self._save_path(job.node, job.context)

    # Loading and promoting

    def load(self, job: LoadJob) -> None:
        for saved in job.segments:  # it may be promoted: until that is known, nobody saves the same state
            saved.pending += 1
        self.store.load(job)

    def loaded(self, done: LoadDone) -> None:
        """A load is over: what it read, and what it found out about the tiers."""
        job = done.job
        for saved in job.segments:
            saved.pending -= 1
        if done.ok:
            for tier, tokens in done.tokens_by_tier().items():
                self._counters.tiers[tier].tokens_loaded += tokens
            for tier, nbytes in done.bytes_by_tier.items():
                self._counters.tiers[tier].bytes_loaded += nbytes
                self.tree.saved.reachable(tier)
            for part in job.parts:
                part.saved.failures = 0
        else:
            self._counters.loads_failed += 1
        for change in job.changes:
            self._tier_changed(change)
        for saved in job.segments:
            self.tree.lost(saved.name, "")  # if it went from its last tier meanwhile

    def promote(self, node: Node, share: int) -> None:
        """Bring up the tiers what a request that resumes at `node` will load: into the nearest, if it takes no more
        than one part in `share` of it. More would drive out what others wait for."""
        if len(self.store.tiers) < 2:
            return
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
        if not lacking or sum(map(self._nbytes, lacking)) * share > nearest.budget_bytes:
            return
        for saved in lacking:
            saved.pending += 1
        self.promotions_under_way += 1
        self.store.promote(PromoteJob(list(lacking)))

    def promoted(self, done: PromoteDone) -> None:
        """A promotion is over."""
        job, segments = done.job, self.tree.saved
        self.promotions_under_way -= 1
        by_name = {saved.name: saved for saved in job.segments}
        for saved in job.segments:
            saved.pending -= 1
        for change in job.changes:
            known = segments.find(change.name)
            if change.change is not Change.PROMOTED or known is None or known is by_name[change.name]:
                self._tier_changed(change)
        for saved in job.segments:
            if segments.find(saved.name) is saved:
                self.tree.lost(saved.name, "")  # if it went from its last tier meanwhile

    # What tiers keep

    def used(self, node: Node) -> None:
        """A request goes on from `node`: what tiers keep of that was just used, the beginning most recently. Older
        snapshots and windows of the same chain were not."""
        if not self.store.tiers:
            return
        live = self.tree.layout.window_first(node.end)
        used = [node.snapshot]
        for each in path_to(node)[::-1]:
            used += [saved for saved in each.windows_saved if saved.end > live]
            used.append(each.rows)
        self.store.touch([saved.name for saved in used if saved is not None])

    def delete_forgotten(self) -> None:
        """Have the tiers remove what the tree needs no longer."""
        self.delete(self.tree.saved.take_forgotten())

    def delete(self, segments: list[Saved]) -> None:
        for saved in segments:
            self._delete_from(saved.name, saved.tiers | saved.unreachable)

    def _delete_from(self, name: str, tiers: set[str]) -> None:
        self.store.delete(name, tiers)
        for tier in tiers & self.audits.keys():
            self.audits[tier].removed(name)

    def _kept(self, name: str, tier: str) -> None:
        if not self.tree.saved.kept(name, tier):  # it was forgotten while the copy was under way
            self._delete_from(name, {tier})

    def _forget(self, name: str, tier: str) -> None:
        self.tree.lost(name, tier)
        if tier in self.audits:
            self.audits[tier].removed(name)

    def _evicted(self, name: str, tier: str) -> None:
        self._counters.tiers[tier].segments_evicted += 1
        if not self.store.has(name, tier):  # saving and loading report apart: it may have come back since
            self._forget(name, tier)

    def _tier_changed(self, change: TierChange) -> None:
        counters = self._counters.tiers[change.tier]
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
                last = max(self.tree.saved.holders(saved), key=lambda node: node.end)
                tokens = np.concatenate([node.tokens for node in path_to(last)])
                self.audits[change.tier].added(saved, tokens, last.space)

    # Reporting

    @property
    def idle(self) -> bool:
        """Nothing is being saved or promoted."""
        return not (self.saves_under_way or self.promotions_under_way)

    def by_tier(self) -> dict[str, dict[str, float]]:
        """Counters and gauges of each tier at this moment."""
        result: dict[str, dict[str, float]] = {}
        for tier in self.store.tiers:
            result[tier.name] = {
                **asdict(self._counters.tiers[tier.name]),
                "used_bytes": tier.used_bytes(),
                "budget_bytes": tier.budget_bytes,
                "opened": float(tier.opened),
                "faults": self.store.faults[tier.name],
                "damaged": self.store.damaged[tier.name],
            }
            if tier.name in self.audits:
                result[tier.name]["max_copies"] = self.audits[tier.name].max_copies
        return result

"""Saving and loading between the device and the tiers, each on its own thread."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import numpy as np
import torch

from holdover.config import FIND_SECONDS
from holdover.errors import TierError
from holdover.state.node import Saved
from holdover.state.pool import DevicePool, Slots
from holdover.state.segment import (
    DamagedSegment,
    Kind,
    Segment,
    SegmentHeader,
    decode,
    encode,
    parse_header,
    segment_bytes,
    state_bytes,
)
from holdover.store.claims import Claims
from holdover.store.finding import HEAD_BYTES, find, look
from holdover.store.jobs import (
    Change,
    Claimed,
    DeleteJob,
    Done,
    FindDone,
    FindJob,
    LoadDone,
    LoadJob,
    LoadPart,
    PromoteDone,
    PromoteJob,
    SaveDone,
    SaveJob,
    TierChange,
    UnclaimJob,
)
from holdover.store.tier import PutStatus, Tier

log = logging.getLogger(__name__)
RETRY_AFTER_FAULT_SECONDS = 5.0
AT_ONCE_BYTES = 4 << 20


class OtherSegment(Exception):
    """A whole segment, but not the one that was expected: another engine has cut the same prefix elsewhere."""


class Worker(Protocol):
    """Runs the jobs that it is given, in order."""

    def submit(self, job: object) -> None:
        """Run `job` after those submitted before."""

    def close(self) -> None:
        """Finish what was submitted, then stop."""


StartWorker = Callable[[str, Callable[..., None]], Worker]  # (name, what runs a job)


class ThreadWorker:
    """A Worker with a thread of its own."""

    def __init__(self, name: str, run: Callable[..., None]) -> None:
        self._jobs: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._run = run
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: object) -> None:
        self._jobs.put(job)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(job)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=30)


class Store:
    """The tiers of one engine, nearest first.

    `done` is called with each finished job, by the worker that ran it. Tests give their own workers, and their own
    clock, or None as `start_worker`: then jobs run when they are submitted.
    """

    def __init__(
        self,
        pool: DevicePool,
        fingerprint: str,
        tiers: list[Tier],
        done: Callable[[Done], None],
        start_worker: StartWorker | None = ThreadWorker,
        clock: Callable[[], float] = time.monotonic,
        find_seconds: float = FIND_SECONDS,
    ) -> None:
        self.pool = pool
        self.layout = pool.layout
        self.fingerprint = fingerprint
        self.tiers = tiers
        self._done = done
        self._clock = clock
        self._find_seconds = find_seconds  # a request waits no longer to hear what shared tiers know of its prompt
        self._silent_until: dict[str, float] = {}
        self._undeleted: dict[str, set[str]] = {tier.name: set() for tier in tiers}
        self.faults = {tier.name: 0 for tier in tiers}
        self.damaged = {tier.name: 0 for tier in tiers}
        start = start_worker if tiers else None
        self._saver = start("holdover-save", self._write) if start is not None else None
        self._loader = start("holdover-load", self._load_anywhere) if start is not None else None
        self.shared_tiers = [tier for tier in tiers if tier.shared]
        finds = start is not None and self.shared_tiers
        self._finder = start("holdover-find", self._find) if start is not None and finds else None
        self._finds: dict[FindJob, None] = {}  # under way
        self.claims = Claims()
        self._promoter = start("holdover-promote", self._promote_all) if start is not None and len(tiers) > 1 else None

    def save(self, job: SaveJob) -> None:
        job.saved.pending += 1
        if self._saver is not None:
            self._saver.submit(job)
        else:
            self._write(job)

    def load(self, job: LoadJob) -> None:
        """Load, at once if that is so little that handing it to another thread would take longer than the copy.

        At once, only the nearest tier is asked: the caller never waits for one that may be slow.
        """
        job.submitted = self._clock()
        if self._loader is None:
            self._load_anywhere(job)
        elif self._small_and_near(job) and (result := self._load(job, self.tiers[:1])).ok:
            self._done(result)
        else:
            self._loader.submit(job)

    def find(self, job: FindJob) -> bool:
        """Ask the shared tiers what they keep of a prompt. False if they haven't answered others in time."""
        now = self._clock()
        if any(other.deadline < now for other in self._finds):
            return False
        job.deadline = now + self._find_seconds
        self._finds[job] = None
        if self._finder is not None:
            self._finder.submit(job)
        else:
            self._find(job)
        return True

    def now(self) -> float:
        """Seconds, by the store's clock."""
        return self._clock()

    def overdue(self, job: FindJob) -> bool:
        """Whether a request has waited long enough for this."""
        return self._clock() >= job.deadline

    def found(self, job: FindJob) -> None:
        """The answer has been heard."""
        self._finds.pop(job, None)

    def promote(self, job: PromoteJob) -> None:
        """Copy segments that lie in farther tiers only into the nearer ones."""
        if self._promoter is not None:
            self._promoter.submit(job)
        else:
            self._promote_all(job)

    def _promote_all(self, job: PromoteJob) -> None:
        """Stops at the first segment that can't be read whole: whoever loads it finds out why."""
        try:
            for saved in job.segments:
                if not self._promote_one(saved, job.changes):
                    break
        except DamagedSegment as error:
            log.info("%s is not promoted: %s", saved.name, error)
        except Exception:
            log.exception("promoting failed; what was to be promoted is loaded from where it is")
        self._done(PromoteDone(job))

    def _promote_one(self, saved: Saved, changes: list[TierChange]) -> bool:
        for i, tier in enumerate(self.tiers):
            if tier.name not in saved.tiers:
                continue
            if i == 0:
                return True
            if self._clock() < self._silent_until.get(tier.name, 0.0):
                return False
            try:
                with tier.get(saved.name) as buffer:
                    if buffer is None:
                        return False
                    header = decode(buffer, self.layout, self.fingerprint, saved.name).header
                    if (header.start, header.end, header.tip, header.rows_tip) != saved.cut:
                        return False
                    self._promote(header, buffer, self.tiers[:i], changes)
                    return True
            except TierError as error:
                self._fault(tier, error)
                return False
        return False

    def _find(self, job: FindJob) -> None:
        result = FindDone(job)
        for tier in self.shared_tiers:
            if tier.name not in job.known or self._clock() < self._silent_until.get(tier.name, 0.0):
                continue
            try:
                found, reach = find(tier, job, self.layout)
                result.found += found
                if tier.claims and result.claimed is None and not result.elsewhere:
                    result.claimed, result.elsewhere = self.claims.ask(tier, job, reach)
                    if result.claimed is not None:  # another may have taken its note away since, all being saved
                        names = {each.header.name for each in found}
                        again, _ = find(tier, job, self.layout)
                        result.found += [each for each in again if each.header.name not in names]
            except TierError as error:
                self._fault(tier, error)
            except Exception:
                log.exception("looking into the %s tier failed", tier.name)
        self._done(result)

    def unclaim(self, claimed: Claimed) -> None:
        """Take a note away, after what was submitted before is saved."""
        job = UnclaimJob(claimed)
        if self._saver is not None:
            self._saver.submit(job)
        else:
            self._write(job)

    def _unclaim(self, claimed: Claimed) -> None:
        self.claims.forget(claimed)
        for tier in self.tiers:
            if tier.name == claimed.tier:
                try:
                    tier.unclaim(claimed.name)
                except TierError as error:
                    self._fault(tier, error)

    def _small_and_near(self, job: LoadJob) -> bool:
        nearest = self.tiers[0]
        if not (self.pool.on_host and nearest.immediate):
            return False
        nbytes = sum(len(part.slots) * state_bytes(self.layout, part.saved.kind) for part in job.parts)
        return nbytes <= AT_ONCE_BYTES and all(nearest.name in each.tiers for each in job.segments)

    def has(self, name: str, tier: str) -> bool:
        """Whether a tier keeps a segment now, by its books."""
        return any(each.has(name) for each in self.tiers if each.name == tier)

    def touch(self, names: list[str]) -> None:
        for tier in self.tiers:
            tier.touch(names)

    def delete(self, name: str, tiers: Iterable[str]) -> None:
        """Remove a segment from tiers, after what was submitted before and before what will be. The caller never waits
        for a tier that may be slow."""
        job = DeleteJob(name, frozenset(tiers))
        if self._saver is not None:
            self._saver.submit(job)
        else:
            self._write(job)

    def _write(self, job: SaveJob | DeleteJob | UnclaimJob) -> None:
        if isinstance(job, SaveJob):
            self._save(job)
            return
        if isinstance(job, UnclaimJob):
            self._unclaim(job.claimed)
            return
        for tier in self.tiers:
            if tier.name in job.tiers:
                self._remove(tier, job.name)

    def _remove(self, tier: Tier, name: str) -> None:
        try:
            tier.delete(name)
        except TierError as error:
            self._undeleted[tier.name].add(name)
            self._fault(tier, error)

    def remove_later(self, tier: str, names: list[str]) -> None:
        """Remove these before anything else is saved into the tier."""
        self._undeleted[tier].update(names)

    def _remove_at_last(self, tier: Tier, wanted: str) -> None:
        """Remove what could not be removed before; what is saved again now (`wanted`) is not to go any more."""
        undeleted = self._undeleted[tier.name]
        undeleted.discard(wanted)
        for name in sorted(undeleted.copy()):  # another thread may add to it
            tier.delete(name)
            undeleted.discard(name)

    def close(self) -> None:
        """Finish what was submitted, then stop."""
        for worker in (self._saver, self._loader, self._finder, self._promoter):
            if worker is not None:
                worker.close()

    # Saving

    def _save(self, job: SaveJob) -> None:
        result = SaveDone(job)
        header = job.header
        num_tokens = header.end - header.start
        # What is new to a tier is the state itself; the header, ids and checksum come on top.
        result.state_bytes = max(1, num_tokens) * state_bytes(self.layout, header.kind)
        encoded: list[torch.Tensor] = []

        def make() -> torch.Tensor:
            if not encoded:
                fill = partial(self._copy, header.kind, job.slots)
                encoded.append(encode(header, self.layout, fill, job.own_tokens, self.pool.block_bytes))
            return encoded[0]

        nbytes = segment_bytes(header, self.layout)
        orphan = False
        # Shared tiers first: where another engine has cut the same prefix elsewhere, all tiers take over its cut.
        for tier in sorted(self.tiers, key=lambda tier: not tier.shared):
            if self._clock() < self._silent_until.get(tier.name, 0.0):
                continue
            if orphan and header.parent_name is not None and not tier.has(header.parent_name):
                continue  # its parent was planned anew: so will this be, and it would lie here twice
            try:
                self._remove_at_last(tier, header.name)
                put = tier.put(header.name, nbytes, make, header.link)
                if put.status is PutStatus.ALREADY_THERE:
                    other = look(tier, header.name, header.link, job.context)
                    if other is None:  # damaged, or gone again: what is new takes its place
                        tier.delete(header.name, header.parent_name)
                        put = tier.put(header.name, nbytes, make, header.link)
                    elif (other.header, other.tokens.tobytes()) != (header, job.own_tokens.tobytes()):
                        result.evicted += [(name, tier.name) for name in put.evicted]
                        nbytes_there = segment_bytes(other.header, self.layout)
                        if result.kept or not tier.adopt(header.name, nbytes_there, other.header.link):
                            continue
                        result.other = other
                        break
                    else:
                        tier.adopt(header.name, nbytes, header.link)
            except TierError as error:
                result.evicted += [(name, tier.name) for name in error.evicted]
                self._fault(tier, error)
                continue
            except Exception:
                log.exception("saving %s into the %s tier failed", header.name, tier.name)
                continue
            result.evicted += [(name, tier.name) for name in put.evicted]
            if put.status is PutStatus.KEPT:
                result.kept[tier.name] = len(encoded[0])
            elif put.status is PutStatus.ALREADY_THERE:
                result.kept[tier.name] = 0
            elif put.status is PutStatus.ORPHAN and header.parent_name is not None:
                result.stale.append((header.parent_name, header.link.parent_tip, tier.name))
                if tier.has(header.parent_name) and not result.kept:
                    break  # another engine's cut is there: what goes on from it is planned anew
                orphan = True
        self._done(result)

    def _copy(self, kind: Kind, slots: Slots, place: torch.Tensor, first: int) -> None:
        if kind is Kind.SNAPSHOT:
            self.pool.copy_snapshot(slots, place)
        elif kind is Kind.WINDOW:
            self.pool.copy_window(slots[first : first + len(place)], place)
        else:
            self.pool.copy_rows(slots[first : first + len(place)], place)

    def _fault(self, tier: Tier, error: TierError) -> None:
        """A tier that fails is left alone for a while; serving goes on without it."""
        self.faults[tier.name] += 1
        self._silent_until[tier.name] = self._clock() + RETRY_AFTER_FAULT_SECONDS
        log.warning("%s; going on without it, next try in %.0f s", error, RETRY_AFTER_FAULT_SECONDS)

    # Loading

    def _load_anywhere(self, job: LoadJob) -> None:
        self._done(self._load(job, self.tiers))

    def _load(self, job: LoadJob, tiers: list[Tier]) -> LoadDone:
        result = LoadDone(job)
        try:
            by_segment: dict[str, list[LoadPart]] = {}
            for part in job.parts:
                by_segment.setdefault(part.saved.name, []).append(part)
            for parts in by_segment.values():
                if not self._load_segment(parts[0].saved, tiers, result, partial(self._place, parts)):
                    result.ok = False
                    break
            if result.ok and job.snapshot is not None:
                result.ok = self._load_segment(job.snapshot, tiers, result, partial(self._place_snapshot, job))
            if not result.ok:
                self._tell_lost(job, tiers)
        except Exception:
            log.exception("loading failed; the request computes instead")
            result.ok = False
        result.seconds = self._clock() - job.submitted
        return result

    @staticmethod
    def _tell_lost(job: LoadJob, tiers: list[Tier]) -> None:
        """What else of a load is not where it was thought to be: so that it is not looked for again, one by one."""
        for saved in job.segments:
            for tier in tiers:
                change = TierChange(Change.LOST, saved.name, tier.name)
                if tier.name in saved.tiers and change not in job.changes and not tier.has(saved.name):
                    job.changes.append(change)

    def _place(self, parts: list[LoadPart], segment: Segment) -> None:
        assert segment.rows is not None
        start = segment.header.start
        for part in parts:
            ids = segment.tokens[part.first - start : part.last - start]
            if len(part.tokens) and not np.array_equal(part.tokens, ids):
                segment.seal.check()
                raise OtherSegment
        write = self.pool.write_window if segment.header.kind is Kind.WINDOW else self.pool.write_rows
        for first, last in segment.seal.blocks(self.pool.block_bytes):
            for part in parts:
                begin, end = max(first, part.first - start), min(last, part.last - start)
                if begin < end:
                    offset = part.first - start
                    write(part.slots[begin - offset : end - offset], segment.rows[begin:end])

    def _place_snapshot(self, job: LoadJob, segment: Segment) -> None:
        assert segment.snapshot is not None
        for first, last in segment.seal.blocks(self.pool.block_bytes):
            self.pool.fill_live(job.live_row, segment.snapshot[first:last], first)

    def _load_segment(
        self, saved: Saved, tiers: list[Tier], result: LoadDone, place: Callable[[Segment], None]
    ) -> bool:
        """Copy one segment in from the nearest of `tiers` that has it whole."""
        for i, tier in enumerate(tiers):
            if tier.name not in saved.tiers or TierChange(Change.LOST, saved.name, tier.name) in result.job.changes:
                continue
            damage: str | None = None
            reachable = True
            try:
                with tier.get(saved.name) as buffer:
                    if buffer is not None:
                        segment = decode(buffer, self.layout, self.fingerprint, saved.name, check=False)
                        header = segment.header
                        if (header.start, header.end) != (saved.start, saved.end):
                            segment.seal.check()
                            raise OtherSegment
                        place(segment)
                        result.tier_of[saved.name] = tier.name
                        result.bytes_by_tier[tier.name] = result.bytes_by_tier.get(tier.name, 0) + len(buffer)
                        self._promote(header, buffer, tiers[:i], result.job.changes)
                        return True
            except OtherSegment:
                result.job.changes.append(TierChange(Change.LOST, saved.name, tier.name))
                continue
            except DamagedSegment as error:
                damage = str(error)
            except TierError as error:
                self._fault(tier, error)
                reachable = False
            if damage is not None:
                self.damaged[tier.name] += 1
                log.warning("removing %s from the %s tier: %s", saved.name, tier.name, damage)
            if reachable:  # also where it was just not there: so that it can be saved again
                self._remove(tier, saved.name)
            gone = reachable and not tier.has(saved.name)
            change = Change.LOST if gone else Change.UNREACHABLE
            result.job.changes.append(TierChange(change, saved.name, tier.name))
        return False

    def _promote(
        self, header: SegmentHeader, buffer: torch.Tensor, nearer: list[Tier], changes: list[TierChange]
    ) -> None:
        name = header.name
        for tier in nearer:
            try:
                self._remove_at_last(tier, name)
                put = tier.put(name, len(buffer), buffer.clone, header.link)
            except TierError as error:
                changes += [TierChange(Change.EVICTED, other, tier.name) for other in error.evicted]
                self._fault(tier, error)
                continue
            except Exception:  # what was asked for is in place; that a nearer tier can't keep it is no reason to fail
                log.exception("promoting %s into the %s tier failed", name, tier.name)
                continue
            changes += [TierChange(Change.EVICTED, other, tier.name) for other in put.evicted]
            if put.status is PutStatus.ALREADY_THERE and not self._same(tier, header):
                continue
            if put.status in (PutStatus.KEPT, PutStatus.ALREADY_THERE):
                nbytes = len(buffer) if put.status is PutStatus.KEPT else 0
                changes.append(TierChange(Change.PROMOTED, name, tier.name, nbytes))

    @staticmethod
    def _same(tier: Tier, header: SegmentHeader) -> bool:
        """Whether a tier keeps this very segment under its name."""
        try:
            head = tier.head(header.name, HEAD_BYTES, header.parent_name)
            return head is not None and parse_header(head)[0] == header
        except DamagedSegment:
            return False

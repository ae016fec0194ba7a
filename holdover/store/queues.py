"""Saving and loading between the device and the tiers, each on its own thread."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Protocol

import torch

from holdover.errors import TierError
from holdover.state.address import Tokens
from holdover.state.node import Node, Saved
from holdover.state.pool import DevicePool, Slots
from holdover.state.segment import (
    DamagedSegment,
    Kind,
    Segment,
    SegmentHeader,
    decode,
    encode,
    segment_bytes,
    state_bytes,
)
from holdover.store.tier import PutStatus, Tier

log = logging.getLogger(__name__)
RETRY_AFTER_FAULT_SECONDS = 5.0
AT_ONCE_BYTES = 4 << 20


@dataclass(eq=False, slots=True)
class SaveJob:
    """One segment to be saved. slots: of its rows, its window rows or its snapshot. node: leased until the job is done.

    prefix: all tokens from position 0 to the segment's end.
    """

    saved: Saved
    header: SegmentHeader
    prefix: Tokens
    slots: Slots
    node: Node


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """A segment to be removed from tiers."""

    name: str
    tiers: frozenset[str]


@dataclass(eq=False, slots=True)
class SaveDone:
    """A save is over. kept: tiers that now keep it, with the bytes put; evicted: (name, tier) that had to go."""

    job: SaveJob
    kept: dict[str, int] = field(default_factory=dict)
    evicted: list[tuple[str, str]] = field(default_factory=list)
    state_bytes: int = 0


@dataclass(eq=False, slots=True)
class LoadPart:
    """Rows or window rows `[first, last)` (positions) of one saved segment, for one node."""

    saved: Saved
    node: Node
    first: int
    last: int
    slots: Slots


class Change(Enum):
    """What a load found or did to a segment in a tier."""

    LOST = "lost"  # it proved missing or damaged
    UNREACHABLE = "unreachable"  # the tier could not be read
    PROMOTED = "promoted"  # it was copied there from a farther tier
    EVICTED = "evicted"  # it had to go for one that was promoted


@dataclass(frozen=True, slots=True)
class TierChange:
    """nbytes: put by a promotion, 0 if the segment was there already."""

    change: Change
    name: str
    tier: str
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class LoadJob:
    """What one sequence lacks on the device: rows and window rows for tree nodes, and a snapshot for its live row.

    changes: what happened to segments in the tiers on the way, in order.
    """

    parts: list[LoadPart]
    snapshot: Saved | None
    live_row: int
    owner: object
    changes: list[TierChange] = field(default_factory=list)

    @property
    def segments(self) -> list[Saved]:
        """Everything that is read, each once."""
        snapshot = [] if self.snapshot is None else [self.snapshot]
        return list(dict.fromkeys([*(part.saved for part in self.parts), *snapshot]))


@dataclass(eq=False, slots=True)
class LoadDone:
    """A load is over. ok: all of it is in place."""

    job: LoadJob
    ok: bool = True
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    bytes_by_tier: dict[str, int] = field(default_factory=dict)


Done = SaveDone | LoadDone


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
    ) -> None:
        self.pool = pool
        self.layout = pool.layout
        self.fingerprint = fingerprint
        self.tiers = tiers
        self._done = done
        self._clock = clock
        self._silent_until: dict[str, float] = {}
        self._undeleted: dict[str, set[str]] = {tier.name: set() for tier in tiers}
        self.faults = {tier.name: 0 for tier in tiers}
        self.damaged = {tier.name: 0 for tier in tiers}
        start = start_worker if tiers else None
        self._saver = start("holdover-save", self._write) if start is not None else None
        self._loader = start("holdover-load", self._load_anywhere) if start is not None else None

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
        if self._loader is None:
            self._load_anywhere(job)
        elif self._small_and_near(job) and (result := self._load(job, self.tiers[:1])).ok:
            self._done(result)
        else:
            self._loader.submit(job)

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

    def _write(self, job: SaveJob | DeleteJob) -> None:
        if isinstance(job, SaveJob):
            self._save(job)
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
        for worker in (self._saver, self._loader):
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
                tokens = job.prefix[header.start : header.end] if header.kind is Kind.ROWS else None
                encoded.append(encode(header, self.layout, partial(self._copy, header.kind, job.slots), tokens))
            return encoded[0]

        nbytes = segment_bytes(header, self.layout)
        for tier in self.tiers:
            if self._clock() < self._silent_until.get(tier.name, 0.0):
                continue
            try:
                self._remove_at_last(tier, header.name)
                put = tier.put(header.name, nbytes, make)
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
        self._done(result)

    def _copy(self, kind: Kind, slots: Slots, place: torch.Tensor) -> None:
        copies = {Kind.ROWS: self.pool.copy_rows, Kind.WINDOW: self.pool.copy_window}
        copies.get(kind, self.pool.copy_snapshot)(slots, place)

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
        except Exception:
            log.exception("loading failed; the request computes instead")
            result.ok = False
        return result

    def _place(self, parts: list[LoadPart], segment: Segment) -> int:
        assert segment.rows is not None
        start, count = segment.header.start, 0
        for part in parts:
            rows = segment.rows[part.first - start : part.last - start]
            if part.saved.kind is Kind.WINDOW:
                self.pool.write_window(part.slots, rows)
                continue
            self.pool.write_rows(part.slots, rows)
            count += part.last - part.first
        return count

    def _place_snapshot(self, job: LoadJob, segment: Segment) -> int:
        assert segment.snapshot is not None
        self.pool.fill_live(job.live_row, segment.snapshot)
        return 0

    def _load_segment(self, saved: Saved, tiers: list[Tier], result: LoadDone, place: Callable[[Segment], int]) -> bool:
        """Copy one segment in from the nearest of `tiers` that has it whole."""
        for i, tier in enumerate(tiers):
            if tier.name not in saved.tiers or TierChange(Change.LOST, saved.name, tier.name) in result.job.changes:
                continue
            damage: str | None = None
            reachable = True
            try:
                with tier.get(saved.name) as buffer:
                    if buffer is not None:
                        segment = decode(buffer, self.layout, self.fingerprint, saved.name)
                        header = segment.header
                        if (header.start, header.end) != (saved.start, saved.end):
                            raise DamagedSegment(
                                f"it holds tokens [{header.start}, {header.end}), not [{saved.start}, {saved.end})"
                            )
                        tokens = place(segment)
                        by_tier = result.tokens_by_tier
                        by_tier[tier.name] = by_tier.get(tier.name, 0) + tokens
                        result.bytes_by_tier[tier.name] = result.bytes_by_tier.get(tier.name, 0) + len(buffer)
                        self._promote(saved.name, buffer, tiers[:i], result.job.changes)
                        return True
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

    def _promote(self, name: str, buffer: torch.Tensor, nearer: list[Tier], changes: list[TierChange]) -> None:
        for tier in nearer:
            try:
                self._remove_at_last(tier, name)
                put = tier.put(name, len(buffer), buffer.clone)
            except TierError as error:
                changes += [TierChange(Change.EVICTED, other, tier.name) for other in error.evicted]
                self._fault(tier, error)
                continue
            except Exception:  # what was asked for is in place; that a nearer tier can't keep it is no reason to fail
                log.exception("promoting %s into the %s tier failed", name, tier.name)
                continue
            changes += [TierChange(Change.EVICTED, other, tier.name) for other in put.evicted]
            if put.status is not PutStatus.REFUSED:
                nbytes = len(buffer) if put.status is PutStatus.KEPT else 0
                changes.append(TierChange(Change.PROMOTED, name, tier.name, nbytes))

"""One engine process of the simulated world, with its tiers."""

from typing import TYPE_CHECKING

import numpy as np
import obstore.store
import torch
from greenlet import getcurrent

from holdover.engine.deferred import Saving
from holdover.engine.engine import Engine
from holdover.engine.messages import Cancel, Generate
from holdover.models.oracle import Oracle
from holdover.state.pool import DevicePool
from holdover.state.segment import Kind
from holdover.state.tree import PrefixTree
from holdover.store.jobs import Done, SaveJob
from holdover.store.memory import MemoryTier
from holdover.store.objects import ObjectTier
from holdover.store.place import Place
from holdover.store.queues import Store
from tests.simulation.tier import SimulatedTier
from tests.simulation.workers import HUB, SimulatedWorker

if TYPE_CHECKING:
    from tests.simulation.client import Client
    from tests.simulation.world import World


class RecordingStore(Store):
    """The store, which also tells the world what the names of segments stand for."""

    world: "World"

    def save(self, job: SaveJob) -> None:
        header, prefixes = job.header, self.world.prefixes
        mine = job.prefix[: header.end if header.kind is Kind.SNAPSHOT else header.start + 1]
        prefix, space = prefixes.setdefault(header.address, (mine.copy(), header.space))
        assert np.array_equal(prefix, mine) and space == header.space, "law 5: one address for two prefixes"
        super().save(job)


class Host:
    """One engine process: what reaches it, what it holds, and what it says."""

    def __init__(self, world: "World", index: int) -> None:
        self.world = world
        self.index = index
        self.name = f"engine {'ABC'[index]}"
        self.life = 0
        self.alive = False
        self.tiers: list[SimulatedTier] = []
        self.waiting_for: dict[int, Client] = {}
        self.start()

    def start(self) -> None:
        if self.alive:
            return
        world, scenario = self.world, self.world.scenario
        self.life += 1
        self.alive = True
        self.rng = world.rng(f"{self.name} {self.life}")
        self.inbox: list[Generate | Cancel] = []
        self.done: list[Done] = []
        self.next_step: float | None = None
        self.num_preemptions = 0
        # The engine's own count of copies is right where it hears of things in the order in which they happen.
        self.audited = scenario.seed % 3 == 0 and (scenario.memory_bytes is None or scenario.object_bytes is None)
        model = Oracle(scenario.kind)
        layout = model.layout
        probe = DevicePool(layout, 1 << 20, scenario.max_running, torch.device("cpu"))
        budget = scenario.device_slots * probe.slot_bytes + scenario.max_running * probe.live_bytes
        if not probe.slots_per_token:
            budget = (3 + scenario.device_slots // 100) * probe.live_bytes + scenario.max_running * probe.live_bytes
        longest = scenario.longest()
        window_rows = min(longest + 12, layout.window + layout.window_block - 1 + scenario.max_batch_tokens) * max(
            1, scenario.device_slots // longest
        )
        budget += window_rows * probe.slots_per_window_row * probe.slot_bytes
        self.pool = DevicePool(layout, budget, scenario.max_running, torch.device("cpu"))
        self.tree = PrefixTree(layout, self.pool)
        self.tiers = self._make_tiers()
        self.store = RecordingStore(
            self.pool, model.fingerprint, list(self.tiers), self._job_done,
            lambda name, run: SimulatedWorker(self, name, run), lambda: world.now,
        )  # fmt: skip
        self.store.world = world
        self.engine = Engine(
            model, self.pool, self.tree, self.store, max_batch_tokens=scenario.max_batch_tokens,
            snapshot_spacing=scenario.snapshot_spacing, audit=self.audited, find_from=1,
            claim_from=scenario.claim_from, saving=Saving(mode=scenario.save, backlog_bytes=scenario.backlog_bytes),
        )  # fmt: skip
        self.engine.scheduler.loading_pays = lambda *_: self.rng.random() < scenario.loads
        self.put_before = {tier.name: tier.bytes_put[self.name] for tier in self.tiers}
        self.engine.check_integrity()

    def _make_tiers(self) -> list[SimulatedTier]:
        world, scenario = self.world, self.world.scenario
        tiers = []
        if scenario.memory_bytes is not None:
            memory = MemoryTier(scenario.memory_bytes)
            tiers.append(SimulatedTier(world, memory, f"memory tier of {self.name}", world.faults_of(0)))
        if scenario.object_bytes is not None:
            index = len(tiers)
            if not scenario.shared_objects:
                old = [tier for tier in self.tiers if isinstance(tier.inner, ObjectTier)]
                place = old[0].inner.place._store if old else obstore.store.MemoryStore()  # type: ignore[attr-defined]
                tier = SimulatedTier(
                    world, ObjectTier(Place(place, "objects"), scenario.object_bytes, "objects"),
                    f"object tier of {self.name}", world.faults_of(index),
                )  # fmt: skip
                if old:
                    tier.bytes_put = old[0].bytes_put
                    for name in tier.scan():
                        tier.count(name, old[0].held[name])
                tiers.append(tier)
            else:
                if world.shared is None:
                    inner = ObjectTier(Place(world.objects, "objects"), scenario.object_bytes, "objects")
                    world.shared = SimulatedTier(world, inner, "object tier", world.faults_of(index))
                tiers.append(world.shared)
        return tiers

    def kill(self) -> None:
        """kill -9: what it was doing stops in the middle, what it held is gone."""
        if not self.alive:
            return
        self.world.tell(self.name, "is killed")
        self.alive = False
        self.store.close()
        lost, self.waiting_for = self.waiting_for, {}
        for request_id, client in lost.items():
            client.connection_lost(request_id)

    # What comes in

    def send(self, message: Generate | Cancel, client: "Client | None" = None) -> None:
        """A message on its way; others may overtake it."""
        if client is not None:
            self.waiting_for[message.id] = client
        life = self.life
        self.world.at(self.rng.random() * self.world.scenario.slow_messages, lambda: self._arrive(message, life))

    def _arrive(self, message: Generate | Cancel, life: int) -> None:
        if self.alive and life == self.life:
            self.inbox.append(message)
            self.wake()

    def _job_done(self, done: Done) -> None:
        life = self.life

        def arrive() -> None:
            if self.alive and life == self.life:
                self.done.append(done)
                self.wake()

        if getcurrent() is HUB:
            self.done.append(done)
            self.wake()
        else:
            self.world.at(0.0 if self.audited else self.rng.random() * 0.002, arrive)

    def wake(self, delay: float | None = None) -> None:
        delay = self.rng.random() * 0.003 if delay is None else delay
        moment = self.world.now + delay
        if self.next_step is not None and self.next_step <= moment:
            return
        self.next_step = moment
        life = self.life
        self.world.at(delay, lambda: self._step(life, moment))

    def _step(self, life: int, moment: float) -> None:
        if not self.alive or life != self.life or moment != self.next_step:
            return
        self.next_step = None
        self.world.acting = self.name
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            if isinstance(message, Generate):
                self.engine.submit(message)
            else:
                self.engine.cancel(message.id)
        done, self.done = self.done, []
        events, active = self.engine.step(done)
        if self.engine.scheduler.num_preemptions > self.num_preemptions:
            self.num_preemptions = self.engine.scheduler.num_preemptions
            self.world.tell(self.name, "preempts a sequence")
        self.engine.check_integrity()
        for event in events:
            client = self.waiting_for.get(event.id)
            if client is not None:
                client.hear(event, self)
        if active or self.done:
            self.wake()
        elif self.engine.has_work:
            self.wake(1.0)
        elif (moment := self.engine.wakes_at()) is not None:
            self.wake(max(0.01, moment - self.world.now))

    # At the end

    def check_at_rest(self) -> None:
        """Nothing is left over when all is said and done."""
        if not self.alive:
            return
        engine, counters, scenario = self.engine, self.engine.counters, self.world.scenario
        assert engine.idle, f"law 7: {self.name} is still busy: {engine.statistics(0).gauges}"
        assert self.tree.num_leases() == 0, f"law 6: {self.name} has {self.tree.num_leases()} leases left"
        assert len(self.engine.holdings._free_live_rows) == self.pool.max_running, "a live row is lost"
        ended = counters.requests_finished + counters.requests_cancelled + counters.requests_failed
        assert ended == counters.requests, "law 8: requests do not add up"
        for saved in self.tree.saved.all():
            assert saved.pending == 0, f"{saved.name} is being saved for ever"
        for tier in self.tiers:
            tier.check_at_rest()
            put = tier.bytes_put[self.name] - self.put_before[tier.name]
            counted = counters.tiers[tier.name].bytes_saved + counters.tiers[tier.name].bytes_promoted
            assert put == counted, (
                f"law 8: {self.name} counts {counted} bytes put into the {tier.shown}, which took {put}"
            )
            hears_all = self.life == 1 and (scenario.engines == 1 or not scenario.shared_objects)
            audits = engine.exchange.audits
            if tier.name in audits and hears_all and not world_vanishes(self.world):
                assert audits[tier.name].max_copies <= 1, f"law 2: {self.name} counts copies in its {tier.name}"
                assert counters.tiers[tier.name].bytes_new_state <= counters.tiers[tier.name].bytes_saved
        assert self.tree.make_room(self.pool.num_slots), "law 6: something unused can't be evicted"
        engine.check_integrity()


def world_vanishes(world: "World") -> bool:
    """Whether a tier loses things behind its own back: what it counts is then more than what it has."""
    return any(fault.kind == "vanish" for fault in world.scenario.faults)

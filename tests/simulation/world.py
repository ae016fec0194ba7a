"""The simulated world: a virtual clock, engines, tiers and clients, and the laws, checked after every event."""

import random
import sys
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

import numpy as np
import obstore.store
import torch
from greenlet import GreenletExit, getcurrent, greenlet

from holdover.engine.engine import Engine
from holdover.engine.messages import Cancel, Failed, Generate, Output, Sampling
from holdover.engine.sampler import SamplerState, choose
from holdover.models.oracle import Oracle
from holdover.state.address import as_tokens
from holdover.state.pool import DevicePool
from holdover.state.tree import PrefixTree
from holdover.store.memory import MemoryTier
from holdover.store.objects import ObjectTier
from holdover.store.queues import Done, SaveJob, Store
from holdover.store.recovery import recover
from tests.simulation.reference import Reference
from tests.simulation.scenario import Fault, Scenario, Session, Turn
from tests.simulation.tier import SimulatedTier

PATIENCE = 300.0  # seconds that a client waits for an answer before it asks again
LAST_MOMENT = 20_000.0  # nothing takes that long but a hang
MOST_EVENTS = 200_000
TEMPERATURE = 400_000.0
HUB = getcurrent()


class World:
    """One run of one scenario. Raises AssertionError when a law is broken."""

    def __init__(self, scenario: Scenario, tell: Callable[[float, str, str], None] | None = None) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.prefixes: dict[bytes, tuple[np.ndarray, bytes]] = {}  # by address: the tokens, and whose they are
        self.seen: dict[str, list[tuple[int, np.ndarray]]] = {}  # by salt: what any request may have computed
        self.acting = ""
        self.broken: list[str] = []
        self.num_events = 0
        self._tell = tell
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()
        self._request_ids = count(1)
        self.reference = Reference(scenario.kind)
        self.objects = obstore.store.MemoryStore()
        self.shared: SimulatedTier | None = None
        self.hosts = [Host(self, i) for i in range(scenario.engines)]
        self.clients = [Client(self, i, session) for i, session in enumerate(scenario.sessions)]

    def tell(self, who: str, what: str) -> None:
        if self._tell is not None:
            self._tell(self.now, who, what)

    def require(self, holds: bool, message: str) -> None:
        """For checks inside jobs, whose errors the store survives."""
        if not holds:
            self.broken.append(message)
            raise AssertionError(message)

    def rng(self, who: str) -> random.Random:
        """A source of chance of its own for each actor, so that leaving one out leaves the others as they are."""
        return random.Random(f"{self.scenario.seed} {who}")

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heappush(self._events, (self.now + delay, next(self._serial), action))

    def pause(self, seconds: float) -> None:
        """Let others go on meanwhile; only jobs of saving and loading can wait, an engine's step can't."""
        current = getcurrent()
        if current is HUB or not isinstance(current, Job) or current.killed:
            return
        acting = self.acting
        self.at(seconds, current.go_on)
        HUB.switch()
        self.acting = acting

    def request_id(self) -> int:
        return next(self._request_ids)

    def faults_of(self, target: int) -> list[Fault]:
        return [fault for fault in self.scenario.faults if fault.kind != "kill" and fault.target == target]

    def run(self) -> None:
        """Until nobody wants anything any more."""
        for fault in self.scenario.faults:
            if fault.kind == "kill" and fault.target < len(self.hosts):
                self.at(fault.start, self.hosts[fault.target].kill)
                self.at(min(fault.end, fault.start + 5.0), self.hosts[fault.target].start)
            elif fault.kind == "vanish":
                self.at(fault.start, lambda fault=fault: self._vanish(fault.target))
        for client in self.clients:
            self.at(client.session.start, client.begin)
        while self._events:
            self.now, _, action = heappop(self._events)
            self.num_events += 1
            if self.now > LAST_MOMENT or self.num_events > MOST_EVENTS:
                raise AssertionError(f"law 7: still not done at {self.now:,.0f} s: {self._unfinished()}")
            action()
            assert not self.broken, self.broken[0]
        assert not self._unfinished(), f"law 7: unfinished at the end: {self._unfinished()}"
        for host in self.hosts:
            host.check_at_rest()

    def _vanish(self, target: int) -> None:
        for host in self.hosts:
            for i, tier in enumerate(host.tiers):
                if i == target:
                    self.tell(tier.shown, "loses all that it keeps")
                    tier.vanish()

    def _unfinished(self) -> list[str]:
        return [client.name for client in self.clients if not client.finished]


class Job(greenlet):
    """A save or load under way; it can be left waiting in the middle."""

    killed = False

    def go_on(self) -> None:
        if not self.dead and not self.killed:
            self.switch()


class SimulatedWorker:
    """Runs jobs in order, each when its time comes."""

    def __init__(self, host: "Host", name: str, run: Callable[..., None]) -> None:
        self.host = host
        self.rng = host.world.rng(f"{host.name} {name} {host.life}")
        self.run = run
        self.jobs: deque[object] = deque()
        self.current: Job | None = None
        self.busy = False

    def submit(self, job: object) -> None:
        self.jobs.append(job)
        if not self.busy:
            self._next()

    def _next(self) -> None:
        self.busy = True
        self.host.world.at(self.rng.random() * 0.006, self._start)

    def _start(self) -> None:
        if self.jobs:
            self.current = Job(self._work, HUB)
            self.current.switch()

    def _work(self) -> None:
        self.host.world.acting = self.host.name
        self.run(self.jobs.popleft())
        self.busy = False
        if self.jobs:
            self._next()

    def close(self) -> None:
        """Die in the middle of whatever was going on."""
        self.jobs.clear()
        if self.current is not None and not self.current.dead:
            self.current.killed = True
            self.current.throw(GreenletExit)


class RecordingStore(Store):
    """The store, which also tells the world what the names of segments stand for."""

    world: World

    def save(self, job: SaveJob) -> None:
        header, prefixes = job.header, self.world.prefixes
        prefix, space = prefixes.setdefault(header.address, (job.prefix.copy(), header.space))
        assert np.array_equal(prefix, job.prefix) and space == header.space, "law 5: one address for two prefixes"
        super().save(job)


class Host:
    """One engine process: what reaches it, what it holds, and what it says."""

    def __init__(self, world: World, index: int) -> None:
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
        self.scheduled = False
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
        window_rows = min(longest + 12, layout.window + scenario.max_batch_tokens) * max(
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
            snapshot_spacing=scenario.snapshot_spacing, audit=self.audited,
        )  # fmt: skip
        self.put_before = {tier.name: tier.bytes_put[self.name] for tier in self.tiers}
        for tier in self.tiers:
            if isinstance(tier.inner, ObjectTier) and self.life > 1:
                found = recover(self.tree, tier, model.fingerprint)  # type: ignore[arg-type]
                self.store.remove_later(tier.name, found.left_behind)
                world.tell(
                    self.name,
                    f"starts again; finds {found.rows} rows, {found.snapshots} snapshots and {found.windows} windows",
                )
        self.engine.check_integrity()

    def _make_tiers(self) -> list[SimulatedTier]:
        world, scenario = self.world, self.world.scenario
        tiers = []
        # Engines that share a tier may cut the same prefix unlike: then a position can lie there more than once.
        alone = scenario.engines == 1 or not scenario.shared_objects
        if scenario.memory_bytes is not None:
            memory = MemoryTier(scenario.memory_bytes)
            tiers.append(SimulatedTier(world, memory, f"memory tier of {self.name}", world.faults_of(0), alone))
        if scenario.object_bytes is not None:
            index = len(tiers)
            if not scenario.shared_objects:
                old = [tier for tier in self.tiers if isinstance(tier.inner, ObjectTier)]
                place = old[0].inner._store if old else obstore.store.MemoryStore()  # type: ignore[attr-defined]
                tier = SimulatedTier(
                    world, ObjectTier(place, "objects", scenario.object_bytes, "objects"),
                    f"object tier of {self.name}", world.faults_of(index), alone,
                )  # fmt: skip
                if old:
                    tier.bytes_put = old[0].bytes_put
                    for name in tier.scan():
                        tier.count(name, old[0].held[name])
                tiers.append(tier)
            else:
                if world.shared is None:
                    inner = ObjectTier(world.objects, "objects", scenario.object_bytes, "objects")
                    world.shared = SimulatedTier(world, inner, "object tier", world.faults_of(index), alone)
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
        if self.scheduled:
            return
        self.scheduled = True
        life = self.life
        self.world.at(self.rng.random() * 0.003 if delay is None else delay, lambda: self._step(life))

    def _step(self, life: int) -> None:
        if not self.alive or life != self.life:
            return
        self.scheduled = False
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

    # At the end

    def check_at_rest(self) -> None:
        """Nothing is left over when all is said and done."""
        if not self.alive:
            return
        engine, counters = self.engine, self.engine.counters
        assert engine.idle, f"law 7: {self.name} is still busy: {engine.statistics(0).gauges}"
        assert self.tree.num_leases() == 0, f"law 6: {self.name} has {self.tree.num_leases()} leases left"
        assert len(self.engine.holdings._free_live_rows) == self.pool.max_running, "a live row is lost"
        ended = counters.requests_finished + counters.requests_cancelled + counters.requests_failed
        assert ended == counters.requests, "law 8: requests do not add up"
        for saved, _ in self.tree._saved.values():
            assert saved.pending == 0, f"{saved.name} is being saved for ever"
        for tier in self.tiers:
            tier.check_at_rest()
            put = tier.bytes_put[self.name] - self.put_before[tier.name]
            counted = counters.tiers[tier.name].bytes_saved + counters.tiers[tier.name].bytes_promoted
            assert put == counted, (
                f"law 8: {self.name} counts {counted} bytes put into the {tier.shown}, which took {put}"
            )
            if tier.name in engine.audits and tier.alone and self.life == 1 and not world_vanishes(self.world):
                assert engine.audits[tier.name].max_copies <= 1, f"law 2: {self.name} counts copies in its {tier.name}"
                assert counters.tiers[tier.name].bytes_new_state <= counters.tiers[tier.name].bytes_saved
        assert self.tree.make_room(self.pool.num_slots), "law 6: something unused can't be evicted"
        engine.check_integrity()


def world_vanishes(world: World) -> bool:
    """Whether a tier loses things behind its own back: what it counts is then more than what it has."""
    return any(fault.kind == "vanish" for fault in world.scenario.faults)


class Client:
    """An agent: sends its turns one after another, and knows what it must hear."""

    def __init__(self, world: World, index: int, session: Session) -> None:
        self.world = world
        self.session = session
        self.name = f"agent {index}"
        self.rng = world.rng(self.name)
        self.history: list[int] = []
        self.prompt: list[int] = []
        self.turn = -1
        self.began = False
        self.finished = False
        self.host_index = session.engine % len(world.hosts)
        self.request = 0
        self.expected: list[list[int]] = []
        self.heard: list[list[int]] = []
        self.ended: list[bool] = []
        self.boundaries: list[int] = []
        self.attempts = 0

    @property
    def now(self) -> Turn:
        return self.session.turns[self.turn]

    def begin(self) -> None:
        parent = None if self.session.parent is None else self.world.clients[self.session.parent]
        if parent is not None and parent is not self:
            if not parent.history and not parent.finished:
                self.world.at(0.1, self.begin)
                return
            cut = int(len(parent.history) * self.session.fork_at)
            self.history = parent.history[:cut]
        if not self.history:
            self.history = list(self.session.system)
        self.system_end = min(len(self.session.system), len(self.history))
        self.began = True
        self._next_turn()

    def _next_turn(self) -> None:
        self.turn += 1
        if self.turn == len(self.session.turns):
            self.finished = True
            return
        turn = self.now
        if turn.kind == "edit":
            self.history = self.history[: int(len(self.history) * turn.at)]
        elif turn.kind == "compact":
            self.history = self.history[: self.system_end] + self.history[-3:]
        if turn.kind != "retry" or not self.prompt:
            self.prompt = self.history + turn.new
        if not self.prompt:
            self.prompt = [1]
        if turn.move:
            self.host_index = (self.host_index + 1) % len(self.world.hosts)
        self._ask()

    def _ask(self) -> None:
        turn, world = self.now, self.world
        host = world.hosts[self.host_index]
        if not host.alive:
            self.host_index = (self.host_index + 1) % len(world.hosts)
            world.at(0.2, self._ask)
            return
        self.attempts += 1
        assert self.attempts < 50, "law 7: a client asks for ever"
        self.request = world.request_id()
        self.expected = [self._expected(turn, i) for i in range(turn.n)]
        self.heard = [[] for _ in range(turn.n)]
        self.ended = [False] * turn.n
        sampling = Sampling(
            max_tokens=turn.max_tokens,
            temperature=0.0 if turn.seed is None else TEMPERATURE,
            seed=turn.seed,
        )
        message = Generate(
            self.request,
            as_tokens(self.prompt).tobytes(),
            sampling,
            n=turn.n,
            boundaries=(self.system_end,) if 0 < self.system_end < len(self.prompt) else (),
            salt=self.session.salt,
        )
        world.tell(
            self.name,
            f"asks {host.name}: request {self.request}, turn {self.turn} ({turn.kind}), {len(self.prompt)} tokens"
            + (f", {turn.n} answers" if turn.n > 1 else "")
            + (f", tenant {self.session.salt}" if self.session.salt else ""),
        )
        for answer in self.expected:
            world.seen.setdefault(self.session.salt, []).append((self.request, as_tokens(self.prompt + answer)))
        host.send(message, self)
        if turn.repeated:
            host.send(message)
        request = self.request
        if turn.cancel_after is not None:
            world.at(turn.cancel_after, lambda: self._go_away(request, host))
        world.at(PATIENCE, lambda: self._lose_patience(request, host))

    def _most_known(self) -> int:
        """The longest prefix of the prompt that other requests of the same tenant may have had computed."""
        prompt, most = as_tokens(self.prompt), 0
        for request, other in self.world.seen[self.session.salt]:
            if request == self.request:
                continue
            length = min(len(prompt), len(other))
            unequal = np.flatnonzero(prompt[:length] != other[:length])
            most = max(most, int(unequal[0]) if len(unequal) else length)
        return most

    def _expected(self, turn: Turn, index: int) -> list[int]:
        reference = self.world.reference
        end = self.world.hosts[0].engine.model.eos_token_ids
        if turn.seed is None:
            return reference.answer(self.prompt, turn.max_tokens, end)
        state, answer = reference.state_after(self.prompt), list[int]()
        sampler = SamplerState(Sampling(max_tokens=turn.max_tokens, temperature=TEMPERATURE), turn.seed, index)
        while len(answer) < turn.max_tokens and not (answer and answer[-1] in end):
            if answer:
                state = reference.feed(state, answer[-1])
            scores = torch.from_numpy(reference.scores(state[-1]))
            answer.append(choose(scores, sampler, len(self.prompt) + len(answer), frozenset()))
        return answer

    def hear(self, event: Output | Failed, host: Host) -> None:
        """Something came for a request of this agent."""
        if event.id != self.request or self.now.lost:
            return
        assert isinstance(event, Output), f"law 7: {self.name} is refused: {event.message}"
        heard = self.heard[event.index]
        heard += event.token_ids
        right = self.expected[event.index]
        assert heard == right[: len(heard)], (
            f"law 1: {self.name}, request {event.id}: token {len(heard)} is {heard[-1]}, not {right[len(heard) - 1]}"
        )
        if event.finish_reason is None:
            return
        assert len(heard) == len(right), f"law 1: {self.name} gets {len(heard)} tokens, not {len(right)}"
        usage = event.usage
        assert usage is not None and usage.prompt_tokens == len(self.prompt)
        assert usage.completion_tokens == len(right), "law 8: completion tokens"
        if self.now.n == 1 and not self.now.repeated:
            known = self._most_known()
            assert usage.cached_tokens <= known, (
                f"law 5 and 8: {usage.cached_tokens} cached tokens, and only {known} were ever known to the tenant"
            )
        assert sum(usage.reused.values()) == usage.cached_tokens, f"law 8: {usage.reused} are not {usage.cached_tokens}"
        assert usage.computed >= len(self.prompt) - usage.cached_tokens, "law 8: computed tokens"
        self.world.tell(
            self.name,
            f"has its answer from {host.name}: {heard}; {usage.cached_tokens} of {usage.prompt_tokens} reused "
            f"{usage.reused}, {usage.computed} computed",
        )
        self.ended[event.index] = True
        if all(self.ended):
            host.waiting_for.pop(event.id, None)
            self._done(right)

    def _done(self, answer: list[int]) -> None:
        turn = self.now
        self.request = 0
        self.attempts = 0
        answer = [token for token in answer if token < 256] if turn.returned else [3, 1, 4]
        self.history = self.prompt + answer
        self.world.at(turn.think, self._next_turn)

    def _go_away(self, request: int, host: Host) -> None:
        if request == self.request:
            self.world.tell(self.name, f"goes away from request {request}")
            host.waiting_for.pop(request, None)
            host.send(Cancel(request))
            self._done(self.expected[0])

    def _lose_patience(self, request: int, host: Host) -> None:
        if request != self.request:
            return
        assert self.now.lost or self.now.repeated or self._waits_for_a_hang(), (
            f"law 7: {self.name} has waited {PATIENCE:.0f} s for request {request}"
        )
        self.now.lost = False
        host.waiting_for.pop(request, None)
        host.send(Cancel(request))
        self._ask()

    def _waits_for_a_hang(self) -> bool:
        return any(fault.kind in ("slow", "hang") for fault in self.world.scenario.faults)

    def connection_lost(self, request: int) -> None:
        """The engine has died."""
        if request == self.request:
            self.world.at(0.1 + self.rng.random(), self._ask)
            self.request = 0


def simulate(scenario: Scenario, story: bool = False) -> World:
    """Run a scenario to its end. Raises whatever went wrong."""

    def tell(now: float, who: str, what: str) -> None:
        print(f"{now:10.4f} s  {who:<24} {what}", file=sys.stdout)

    world = World(scenario, tell if story else None)
    try:
        world.run()
    finally:
        for host in world.hosts:
            if host.alive:
                host.store.close()
    return world

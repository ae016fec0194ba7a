"""The simulated world: a virtual clock, engines, tiers and clients, and the laws, checked after every event."""

import random
import sys
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

import numpy as np
import obstore.store
from greenlet import getcurrent

from tests.simulation.client import Client
from tests.simulation.host import Host
from tests.simulation.reference import Reference
from tests.simulation.scenario import Fault, Scenario
from tests.simulation.tier import SimulatedTier
from tests.simulation.workers import HUB, Job

LAST_MOMENT = 20_000.0  # nothing takes that long but a hang
MOST_EVENTS = 200_000


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

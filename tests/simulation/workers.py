"""Threads of the simulated world: jobs that can be left waiting in the middle, and what runs them."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from greenlet import GreenletExit, getcurrent, greenlet

if TYPE_CHECKING:
    from tests.simulation.host import Host

HUB = getcurrent()


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

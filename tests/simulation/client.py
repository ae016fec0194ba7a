"""An agent of the simulated world, which knows what it must hear."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from holdover.engine.messages import Cancel, Failed, Generate, Output, Sampling
from holdover.engine.sampler import SamplerState, choose
from holdover.state.address import as_tokens
from tests.simulation.scenario import Session, Turn

if TYPE_CHECKING:
    from tests.simulation.host import Host
    from tests.simulation.world import World

PATIENCE = 300.0  # seconds that a client waits for an answer before it asks again
TEMPERATURE = 400_000.0


class Client:
    """An agent: sends its turns one after another, and knows what it must hear."""

    def __init__(self, world: "World", index: int, session: Session) -> None:
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

    def hear(self, event: Output | Failed, host: "Host") -> None:
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

    def _go_away(self, request: int, host: "Host") -> None:
        if request == self.request:
            self.world.tell(self.name, f"goes away from request {request}")
            host.waiting_for.pop(request, None)
            host.send(Cancel(request))
            self._done(self.expected[0])

    def _lose_patience(self, request: int, host: "Host") -> None:
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

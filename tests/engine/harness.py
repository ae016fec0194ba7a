"""A whole engine in the test's own process, driven by hand; saves and loads run in the order the test decides."""

import time

import numpy as np
import torch

from holdover.engine.engine import Engine
from holdover.engine.messages import Failed, Generate, Output, Sampling
from holdover.models.base import Model
from holdover.state.pool import DevicePool
from holdover.state.tree import PrefixTree
from holdover.store.jobs import Done
from holdover.store.queues import Store
from holdover.store.tier import Tier


class Bench:
    """An engine and its clients."""

    def __init__(
        self,
        model: Model,
        device_bytes: int = 4 << 20,
        tiers: tuple[Tier, ...] = (),
        max_running: int = 4,
        max_batch_tokens: int = 64,
        **options: object,
    ) -> None:
        self.done: list[Done] = []
        self.pool = DevicePool(model.layout, device_bytes, max_running, torch.device("cpu"))
        self.tree = PrefixTree(model.layout, self.pool)
        self.store = Store(self.pool, model.fingerprint, list(tiers), self.done.append, start_worker=None)
        self.engine = Engine(
            model, self.pool, self.tree, self.store,
            max_batch_tokens=max_batch_tokens, snapshot_spacing=100, audit=True, **options,
        )  # fmt: skip
        self.outputs: dict[int, list[Output]] = {}
        self.failures: dict[int, Failed] = {}
        self._ids = 0

    def submit(self, prompt: list[int], max_tokens: int = 4, **options: object) -> int:
        self._ids += 1
        sampling = {"temperature": 0.0, "ignore_eos": True}
        request_fields = {k: options.pop(k) for k in ("n", "salt", "session", "boundaries") if k in options}
        request = Generate(
            self._ids,
            np.asarray(prompt, dtype="<u4").tobytes(),
            Sampling(max_tokens=max_tokens, **{**sampling, **options}),
            **request_fields,
        )
        self.outputs[self._ids] = []
        self.engine.submit(request)
        return self._ids

    def step(self) -> bool:
        """One step. Whether the model ran."""
        done, self.done[:] = list(self.done), []
        events, ran = self.engine.step(done)
        for event in events:
            if isinstance(event, Output):
                self.outputs[event.id].append(event)
            else:
                self.failures[event.id] = event
        self.engine.check_integrity()
        return ran

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if self.engine.idle and not self.done:
                return
            if not self.step() and self.store._saver is not None:
                time.sleep(0.001)  # real threads are at work: a limit of steps must not be one of their speed
        raise AssertionError("the engine does not come to an end")

    def ask(self, prompt: list[int], max_tokens: int = 4, **options: object) -> list[int]:
        """Tokens of one request, run to its end."""
        request = self.submit(prompt, max_tokens, **options)
        self.run()
        return self.tokens(request)

    def tokens(self, request: int, index: int = 0) -> list[int]:
        return [token for out in self.outputs[request] if out.index == index for token in out.token_ids]

    def text(self, request: int) -> str:
        return "".join(out.text for out in self.outputs[request])

    def usage(self, request: int, index: int = 0):
        return next(out.usage for out in self.outputs[request] if out.index == index and out.usage is not None)

    def last(self) -> int:
        return self._ids

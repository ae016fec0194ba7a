"""A real tier seen through the simulation: slow and faulty as the scenario says, and with books of its own."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import obstore
import torch

from holdover.errors import TierError
from holdover.state.segment import Kind, Link, SegmentHeader, parse_header
from holdover.store.audit import WINDOW_SALT, position_digests
from holdover.store.memory import MemoryTier
from holdover.store.objects import ObjectTier
from holdover.store.tier import ALONE, PutResult, PutStatus, Tier
from tests.simulation.scenario import Fault

if TYPE_CHECKING:
    from tests.simulation.world import World

REFUSING = {"error": ("get", "put", "delete"), "readonly": ("put", "delete"), "crash": ("get", "put")}


class Broken(RuntimeError):
    """A fault that no tier should raise, and some will."""


class SimulatedTier:
    """Law 2, 3 and 6 are checked at every call."""

    def __init__(self, world: "World", inner: Tier, name: str, faults: list[Fault]) -> None:
        self.world = world
        self.inner = inner
        self.name = inner.name
        self.shown = name
        self.budget_bytes = inner.budget_bytes
        self.immediate = inner.immediate
        self.shared = inner.shared
        self.claims = inner.claims
        self.opened = True
        self.faults = faults
        self.rng = random.Random(f"{world.scenario.seed} {name}")
        self.copies: Counter[int] = Counter()
        self.held: dict[str, list[int]] = {}
        self.bytes_put: Counter[str] = Counter()  # by engine

    # What the store calls

    def has(self, name: str) -> bool:
        return self.inner.has(name)

    @contextmanager
    def get(self, name: str) -> Iterator[torch.Tensor | None]:
        self._pass_time("get")
        damage = self._meet_faults("get")
        with self.inner.get(name) as buffer:
            self._pass_time("get")
            self.world.tell(self.shown, f"gives {short(name)}{' ' + damage if damage else ''}: {size(buffer)}")
            if buffer is not None:
                yield self._damaged(buffer, damage, name)
                self._pass_time("get")
            else:
                yield None

    def put(self, name: str, nbytes: int, make: Callable[[], torch.Tensor], link: Link = ALONE) -> PutResult:
        self._pass_time("put")
        self._meet_faults("put")

        header: list[SegmentHeader] = []
        tokens: list[np.ndarray] = []

        def slowly() -> torch.Tensor:
            self._pass_time("put")
            buffer = make()
            parsed, _, data_start, _ = parse_header(buffer.numpy().data)
            header.append(parsed)
            num_tokens = parsed.end - parsed.start
            tokens.append(np.frombuffer(buffer.numpy().data[data_start : data_start + 4 * num_tokens], dtype="<u4"))
            self.world.require(len(buffer) == nbytes, "a segment is not as long as was announced")
            self._check_budget()
            self._pass_time("put")
            return buffer

        try:
            result = self.inner.put(name, nbytes, slowly, link)
        except BaseException:
            for other in [other for other in self.held if not self.inner.has(other)]:
                self._removed(other)
            raise
        for other in result.evicted:
            self._removed(other)
        if result.status is PutStatus.KEPT:
            self.bytes_put[self.world.acting] += nbytes
            self.world.require(header[0].name == name, "a segment under the name of another")
            self._added(header[0], tokens[0])
        evicted = ", ".join(short(other) for other in result.evicted)
        self.world.tell(
            self.shown,
            f"{'keeps' if result.status is PutStatus.KEPT else result.status.value + ':'} {short(name)}, {nbytes} bytes"
            + (f"; {evicted} had to go" if evicted else ""),
        )
        self._check_budget()
        self._pass_time("put")
        return result

    def delete(self, name: str, parent: str | None = None) -> None:
        self._meet_faults("delete")
        try:
            self.inner.delete(name, parent)
        finally:
            for other in [other for other in self.held if not self.inner.has(other)]:  # what goes on from it goes too
                self._removed(other)

    def scan(self) -> Iterator[str]:
        return self.inner.scan()

    def touch(self, names: list[str]) -> None:
        self.inner.touch(names)

    def used_bytes(self) -> int:
        return self.inner.used_bytes()

    def head(self, name: str, nbytes: int, parent: str | None) -> bytes | None:
        self._pass_time("get")
        damage = self._meet_faults("get")
        head = self.inner.head(name, nbytes, parent)
        self._pass_time("get")
        if head is None or not damage:
            return head
        buffer = self._damaged(torch.frombuffer(bytearray(head), dtype=torch.uint8), damage, name)
        return None if buffer is None else buffer.numpy().tobytes()[:nbytes]

    def heads(self, names: Iterable[str], nbytes: int) -> dict[str, bytes]:
        self._pass_time("get")
        if self.rng.random() < 0.5:
            return {}
        found = {name: self.head(name, nbytes, link_parent(self.inner, name)) for name in names if self.inner.has(name)}
        return {name: head for name, head in found.items() if head is not None}

    def adopt(self, name: str, nbytes: int, link: Link) -> bool:
        return self.inner.adopt(name, nbytes, link)

    def claim(self, name: str, content: bytes) -> bytes | None:
        self._pass_time("put")
        self._meet_faults("put")
        there = self.inner.claim(name, content)
        self._pass_time("put")
        return there

    def claimed(self, name: str) -> bytes | None:
        self._pass_time("get")
        self._meet_faults("get")
        return self.inner.claimed(name)

    def unclaim(self, name: str) -> None:
        self._meet_faults("delete")
        self.inner.unclaim(name)

    # Faults

    def _active(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.start <= self.world.now < fault.end]

    def _pass_time(self, call: str) -> None:
        seconds = self.rng.random() * 0.004
        for fault in self._active():
            if fault.kind == "slow":
                seconds += self.rng.random() * 2
            elif fault.kind == "hang":
                seconds = max(seconds, fault.end - self.world.now)
        self.world.pause(seconds)

    def _meet_faults(self, call: str) -> str:
        """Raise, or return the kind of damage that what is read will have."""
        for fault in self._active():
            if fault.kind in ("slow", "hang", "vanish") or self.rng.random() >= fault.rate:
                continue
            if call in REFUSING.get(fault.kind, ()):
                self.world.tell(self.shown, f"fails to {call} ({fault.kind})")
                if fault.kind == "crash":
                    raise Broken(f"the {self.name} tier breaks")
                raise TierError(f"the {self.name} tier fails to {call}")
            if call == "get" and fault.kind in ("flip", "truncate", "foreign", "missing"):
                return fault.kind
        return ""

    def _damaged(self, buffer: torch.Tensor, damage: str, name: str) -> torch.Tensor | None:
        if damage == "flip":
            buffer = buffer.clone()
            buffer[self.rng.randrange(len(buffer))] ^= 1 << self.rng.randrange(8)
        elif damage == "truncate":
            buffer = buffer[: self.rng.randrange(len(buffer))].clone()
        elif damage == "foreign":
            others = sorted(other for other in self.inner.scan() if other != name)
            if others:
                with self.inner.get(self.rng.choice(others)) as other:
                    return None if other is None else other.clone()
        elif damage == "missing":
            return None
        return buffer

    def vanish(self) -> None:
        """All that the tier keeps is gone, behind its back."""
        for name in list(self.inner.scan()):
            if isinstance(self.inner, ObjectTier):
                self.inner._remove(name)
                self._removed(name)
            else:
                self.inner.delete(name)
                if not self.inner.has(name):
                    self._removed(name)

    # Books

    def _added(self, header: SegmentHeader, tokens: np.ndarray) -> None:
        prefix, space = self.world.prefixes[header.address]
        if header.kind is not Kind.SNAPSHOT:
            prefix = np.concatenate([prefix[: header.start], tokens])
        salt = int.from_bytes(space[:8], "little")
        if header.kind is not Kind.SNAPSHOT:
            salt ^= WINDOW_SALT if header.kind is Kind.WINDOW else 0
            self.count(header.name, [digest ^ salt for digest in position_digests(prefix, header.start)])
        else:
            self.count(header.name, [~position_digests(prefix, header.end - 1)[0] ^ salt])

    def count(self, name: str, digests: list[int]) -> None:
        """The tier now holds these positions."""
        self._removed(name)  # the tier had lost it
        self.held[name] = digests
        for digest in digests:
            self.copies[digest] += 1
        twice = sum(self.copies[digest] > 1 for digest in digests)
        others = [other for other in self.held if other != name and not set(digests).isdisjoint(self.held[other])]
        self.world.require(
            not twice,
            f"law 2: {twice} positions of {short(name)} lie twice in the {self.shown}, also in "
            + ", ".join(map(short, others)),
        )

    def _removed(self, name: str) -> None:
        for digest in self.held.pop(name, ()):
            self.copies[digest] -= 1

    def _check_budget(self) -> None:
        used = self.inner.used_bytes()
        self.world.require(used <= self.budget_bytes, f"law 6: {self.shown} counts {used} of {self.budget_bytes} bytes")
        if isinstance(self.inner, MemoryTier):
            held = sum(len(buffer) for buffer in self.inner._buffers.values())
            self.world.require(held <= used, f"law 6: {self.shown} holds {held} bytes and counts {used}")

    def check_at_rest(self) -> None:
        """Nothing is being read or written any more."""
        entries = self.inner._ledger._entries  # type: ignore[attr-defined]
        assert all(entry.complete and not entry.leases for entry in entries.values()), f"{self.shown}: a lease is left"
        if isinstance(self.inner, ObjectTier):
            pages = obstore.list(self.inner.place._store, prefix="segments")
            held = sum(item["size"] for page in pages for item in page)
            assert held <= self.inner.used_bytes(), f"law 6: {self.shown} holds {held} bytes, more than it counts"


def link_parent(tier: Tier, name: str) -> str | None:
    """What stands in a segment's path for its parent."""
    return tier._ledger.parent(name)  # type: ignore[attr-defined, no-any-return]


def short(name: str) -> str:
    return f"{name[:6]}.{name.split('.')[-1]}"


def size(buffer: torch.Tensor | np.ndarray | None) -> str:
    return "nothing" if buffer is None else f"{len(buffer)} bytes"

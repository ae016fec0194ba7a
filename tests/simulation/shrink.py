"""Cut a failing scenario down to what it takes to fail, and keep it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tests.simulation.scenario import Scenario

KEPT = Path(__file__).parent / "kept"


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with a little less in them, the boldest cuts first."""

    def copy() -> Scenario:
        return msgspec.convert(msgspec.to_builtins(scenario), Scenario)

    for i in range(len(scenario.faults)):
        made = copy()
        del made.faults[i]
        yield made
    for i in range(len(scenario.sessions)):
        made = copy()
        del made.sessions[i]
        for session in made.sessions:
            if session.parent is not None and session.parent >= i:
                session.parent = session.parent - 1 if session.parent > i else None
        yield made
    for i, session in enumerate(scenario.sessions):
        for j in range(len(session.turns)):
            if len(session.turns) > 1:
                made = copy()
                del made.sessions[i].turns[j]
                yield made
    if scenario.engines > 1:
        made = copy()
        made.engines -= 1
        made.faults = [fault for fault in made.faults if fault.kind != "kill" or fault.target < made.engines]
        yield made
    for tier in ("memory_bytes", "object_bytes"):
        if getattr(scenario, tier) is not None:
            made = copy()
            setattr(made, tier, None)
            yield made
    for i, session in enumerate(scenario.sessions):
        if len(session.system) > 1:
            made = copy()
            made.sessions[i].system = session.system[: len(session.system) // 2]
            yield made
        if session.parent is not None:
            made = copy()
            made.sessions[i].parent = None
            yield made
        for j, turn in enumerate(session.turns):
            plain = {"n": 1, "seed": None, "cancel_after": None, "lost": False, "repeated": False, "move": False}
            for name, value in plain.items():
                if getattr(turn, name) != value:
                    made = copy()
                    setattr(made.sessions[i].turns[j], name, value)
                    yield made
            if len(turn.new) > 1:
                made = copy()
                made.sessions[i].turns[j].new = turn.new[: len(turn.new) // 2]
                yield made
            if turn.max_tokens > 1:
                made = copy()
                made.sessions[i].turns[j].max_tokens //= 2
                yield made


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], most_tries: int = 600) -> Scenario:
    """The smallest scenario found for which `fails` still holds."""
    tries = 0
    found = True
    while found and tries < most_tries:
        found = False
        for candidate in smaller(scenario):
            tries += 1
            if fails(candidate):
                scenario, found = candidate, True
                break
            if tries >= most_tries:
                break
    return scenario


def keep(scenario: Scenario, folder: Path = KEPT) -> Path:
    """Write a scenario where the tests run it from now on."""
    folder.mkdir(exist_ok=True)
    path = folder / f"seed-{scenario.seed}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(scenario), indent=1) + b"\n")
    return path


def load(path: Path) -> Scenario:
    return msgspec.json.decode(path.read_bytes(), type=Scenario)

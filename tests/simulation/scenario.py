"""What happens in one simulation, as plain data: made from a seed, cut down when it fails, kept as JSON."""

import random
from typing import Literal

import msgspec

from holdover.config import SaveMode

FaultKind = Literal[
    "error", "readonly", "crash", "flip", "truncate", "foreign", "missing", "slow", "hang", "vanish", "kill"
]
TIER_FAULTS: tuple[FaultKind, ...] = (
    "error", "readonly", "crash", "flip", "truncate", "foreign", "missing", "slow", "hang", "vanish",
)  # fmt: skip


class Turn(msgspec.Struct):
    """One request of a session. kind: what the client does to its history first.

    continue: send it all again, with the new message. retry: send the last prompt again. edit: cut the history at
    `at` (a share of its length) and go on from there. compact: keep the system prompt and a summary.
    returned: whether the answer comes back in the history, or the client puts another text in its place.
    cancel_after: seconds until the client goes away. seed: sample with it; None for greedy. lost: the answer never
    arrives. repeated: the message arrives twice.
    """

    kind: Literal["continue", "retry", "edit", "compact"]
    new: list[int]
    max_tokens: int
    at: float = 0.0
    returned: bool = True
    cancel_after: float | None = None
    n: int = 1
    seed: int | None = None
    think: float = 0.0
    lost: bool = False
    repeated: bool = False
    move: bool = False  # to another engine


class Session(msgspec.Struct):
    """An agent. parent: the session whose history, cut at `fork_at`, this one starts from (once it has one)."""

    system: list[int]
    turns: list[Turn]
    start: float = 0.0
    salt: str = ""
    parent: int | None = None
    fork_at: float = 1.0
    engine: int = 0


class Fault(msgspec.Struct):
    """Something bad that lasts from `start` to `end` (seconds). rate: share of the calls that meet it."""

    kind: FaultKind
    start: float
    end: float
    target: int = 0  # engine, or tier
    rate: float = 1.0


class Scenario(msgspec.Struct):
    """Everything that decides a run: the same scenario runs the same way every time."""

    seed: int
    kind: str
    sessions: list[Session]
    faults: list[Fault]
    engines: int = 1
    device_slots: int = 1000
    max_running: int = 2
    max_batch_tokens: int = 32
    snapshot_spacing: int = 40
    memory_bytes: int | None = None
    object_bytes: int | None = None
    shared_objects: bool = False
    slow_messages: float = 0.01  # seconds, at most
    save: SaveMode = SaveMode.EAGER
    backlog_bytes: int = 1 << 26
    claim_from: int = 1 << 30
    loads: float = 1.0  # share of the times that loading is thought to be faster than computing

    def longest(self) -> int:
        """Most tokens that any request can have, its answer included."""
        histories: list[int] = []
        most = 0
        for session in self.sessions:
            length = len(session.system)
            if session.parent is not None and session.parent < len(histories):
                length = max(length, histories[session.parent])
            for turn in session.turns:
                length += len(turn.new) + turn.max_tokens
                most = max(most, length)
            histories.append(length)
        return most


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    alphabet = rng.choice([2, 3, 256, 256])
    phrases = [[rng.randrange(alphabet) for _ in range(_length(rng))] for _ in range(rng.randint(2, 6))]
    systems = [[rng.randrange(alphabet) for _ in range(rng.randint(1, 80))] for _ in range(rng.randint(1, 2))]

    def message() -> list[int]:
        if rng.random() < 0.5:
            return list(rng.choice(phrases))
        return [rng.randrange(alphabet) for _ in range(_length(rng))]

    engines = rng.choices([1, 2, 3], [6, 3, 1])[0]
    tenants = rng.choices([[""], ["", "b"]], [3, 1])[0]
    sampled, several = rng.random() < 0.2, rng.random() < 0.2
    cancels, loses = rng.random() < 0.3, rng.random() < 0.2
    talkative = rng.random() < 0.15  # answers longer than what is set aside for growing: sequences are preempted
    burst = talkative or rng.random() < 0.4
    weight = rng.choice([0.0, 0.8])  # sessions of much the same length: the device holds one or two, tiers the rest
    sessions: list[Session] = []
    for index in range(rng.randint(1, 7)):
        turns = [
            Turn(
                kind=rng.choices(["continue", "retry", "edit", "compact"], [7, 1, 1.5, 0.5])[0],
                new=message(),
                max_tokens=rng.choice([50, 90] if talkative else [1, 2, 3, 6, 10]),
                at=rng.random(),
                returned=rng.random() < 0.8,
                cancel_after=rng.random() * 0.2 if cancels and rng.random() < 0.3 else None,
                n=2 if several and rng.random() < 0.4 else 1,
                seed=rng.randrange(1000) if sampled and rng.random() < 0.5 else None,
                think=rng.random() ** 3 * 2,
                lost=loses and rng.random() < 0.1,
                repeated=loses and rng.random() < 0.2,
                move=engines > 1 and rng.random() < 0.3,
            )
            for _ in range(1 if talkative else rng.randint(1, 6))
        ]
        if rng.random() < weight:
            turns[0].new = turns[0].new + [rng.randrange(alphabet) for _ in range(rng.randint(60, 140))]
        twin = sessions[-1] if sessions and rng.random() < 0.25 else None
        sessions.append(
            Session(
                system=list(rng.choice(systems)),
                turns=turns,
                start=0.0 if burst else rng.random() * 2,
                salt=rng.choice(tenants),
                parent=rng.randrange(index) if index and rng.random() < 0.3 else None,
                fork_at=rng.choice([1.0, rng.random()]),
                engine=rng.randrange(engines),
            )
        )
        if twin is not None:  # the same prompt at the same moment
            sessions[-1].system, sessions[-1].start = twin.system, twin.start
            sessions[-1].turns[0].new, sessions[-1].parent = twin.turns[0].new, twin.parent
    scenario = Scenario(
        seed=seed,
        kind=rng.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0],
        sessions=sessions,
        faults=[],
        engines=engines,
        max_running=rng.choice([3, 6] if talkative else [1, 2, 3, 6]),
        max_batch_tokens=rng.choice([7, 16, 32, 64, 200]),
        snapshot_spacing=rng.choice([16, 40, 1000]),
        slow_messages=rng.choice([0.001, 0.01, 0.5]),
    )
    longest = scenario.longest()
    scenario.device_slots = int(longest * rng.choice([1.0, 1.0, 1.0, 1.2, 2.0, 6.0])) + 12
    segment = 24 * longest + 2000
    if rng.random() < 0.75:
        scenario.memory_bytes = int(segment * rng.choice([0.3, 1.0, 50.0, 50.0]))
    if rng.random() < 0.6:
        scenario.object_bytes = int(segment * rng.choice([0.5, 2.0, 100.0, 100.0]))
        scenario.shared_objects = rng.random() < 0.6
    if rng.random() < 0.7:
        for _ in range(rng.randint(1, 4)):
            kill = rng.random() < 0.3
            start = rng.random() * 2
            scenario.faults.append(
                Fault(
                    kind="kill" if kill else rng.choice(TIER_FAULTS),
                    start=start,
                    end=start + rng.choice([0.1, 0.5, 30.0, 30.0]),
                    target=rng.randrange(engines) if kill else rng.randrange(2),
                    rate=rng.choice([0.2, 1.0]),
                )
            )
    scenario.save = rng.choice(list(SaveMode))
    scenario.backlog_bytes = int(segment * rng.choice([0.1, 1.0, 50.0]))
    scenario.claim_from = rng.choice([1, 20, 1 << 30])
    scenario.loads = rng.choice([1.0, 1.0, 0.5])
    return scenario


KIND_WEIGHTS = {"hybrid": 5, "dense": 3, "recurrent": 2, "mixed": 2, "sliding": 1, "everything": 2}


def _length(rng: random.Random) -> int:
    return rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 60)])

"""When a session will come back from its tool call, judged by its earlier ones: its state can wait for it."""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from holdover.state.node import Node

LEAST_CALLS = 2  # of which the times are known, before a guess is made
CALLS_REMEMBERED = 8
MOST_SESSIONS = 4096  # that are away; then those that have been away for longest are forgotten
LEAD_SECONDS = 2.0  # before it is likely to come back
GIVE_UP_AFTER = 3.0  # times as long as was expected


def expected_seconds(calls: tuple[float, ...]) -> float | None:
    """The shorter of what is usual: a quarter of the calls were shorter still. None if too little is known."""
    return sorted(calls)[(len(calls) - 1) // 4] if len(calls) >= LEAST_CALLS else None


@dataclass(frozen=True, slots=True)
class Away:
    """A session between two turns. node: where its state ends; since: when its turn ended, by the store's clock; calls:
    seconds that it was away before, the last one last."""

    node: Node
    since: float
    calls: tuple[float, ...]


class ToolTimes:
    """Sessions between their turns. A session is known by the node where the prompt of its last turn ends: its next
    prompt goes on from there, whatever became of the answer."""

    def __init__(self) -> None:
        self._away: dict[Node, Away] = {}
        self._due: list[tuple[float, int, Node, Away]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self._away)

    def leaves(self, prompt_end: Node, away: Away) -> None:
        """A turn has ended, and its answer is on its way to the agent."""
        self._away.pop(prompt_end, None)
        self._away[prompt_end] = away
        if len(self._away) > MOST_SESSIONS:
            del self._away[next(iter(self._away))]
        if (expected := expected_seconds(away.calls)) is not None:
            self._queue(away.since + max(0.0, expected - LEAD_SECONDS), prompt_end, away)

    def comes_back(self, node: Node, now: float) -> tuple[float, ...]:
        """A request goes on from `node`: its session's calls, with the one that has just ended. () for a new one."""
        each: Node | None = node
        while each is not None:
            if (away := self._away.pop(each, None)) is not None:
                return (*away.calls, now - away.since)[-CALLS_REMEMBERED:]
            each = each.parent
        return ()

    def due(self, now: float) -> list[Away]:
        """Sessions that are likely to come back within the next seconds. Each is named again after a while, until it
        has come or is not expected any more."""
        result = []
        while self._due and self._due[0][0] <= now:
            _, _, prompt_end, away = heappop(self._due)
            expected = expected_seconds(away.calls)
            if self._away.get(prompt_end) is not away or expected is None:
                continue
            result.append(away)
            if now - away.since < GIVE_UP_AFTER * expected:
                self._queue(now + max(1.0, expected / 4), prompt_end, away)
        return result

    def next_due(self) -> float | None:
        """When `due` may have something to name."""
        return self._due[0][0] if self._due else None

    def _queue(self, moment: float, prompt_end: Node, away: Away) -> None:
        heappush(self._due, (moment, next(self._serial), prompt_end, away))

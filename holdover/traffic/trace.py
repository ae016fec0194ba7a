"""Recorded sessions, whatever file they came from."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and its response. The prompt is token ids or chat messages, never both.

    think_seconds: from the end of the turn before to this request. output_tokens: length of the recorded response.
    """

    output_tokens: int
    think_seconds: float = 0.0
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """One agent's run of turns, in order."""

    id: str
    turns: tuple[Turn, ...]

    def part(self, first: int, last: int) -> "Session":
        """The session with turns `[first, last)` only."""
        return Session(self.id, self.turns[first:last])

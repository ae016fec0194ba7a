"""One choice of one request, from its arrival to its last token."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from holdover.engine.messages import Generate, Usage
from holdover.engine.sampler import SamplerState
from holdover.engine.text import StopStrings, TextDecoder
from holdover.state.address import Tokens
from holdover.state.node import Node
from holdover.state.pool import Slots
from holdover.store.jobs import Claimed, PrefixContext


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # holds nothing on the device
    LOADING = "loading"  # holds slots and a live row that a load is filling
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens, how far they are computed, and what the sequence holds on the device.

    tokens: uint32 [capacity], of which `length` count. position: tokens whose state is in place. table: int64
    [capacity], slots of the first `allocated` tokens; those before `shared` belong to the tree (leased through
    `node`), the others to the sequence. window: int64 [capacity, slots_per_window_row], slots of the window rows of
    tokens `[window_start, position)`; those before `window_shared` belong to the tree; window_spare: the sequence's
    window rows that hold nothing yet, or nothing of use any more. stops: positions, ascending, at which prefill
    keeps a snapshot.
    """

    request: Generate
    index: int
    arrival: int
    arrived: float
    space: bytes
    context: PrefixContext
    tokens: Tokens
    prompt_end: int
    sampler: SamplerState
    decoder: TextDecoder
    stop_strings: StopStrings
    end_tokens: frozenset[int]
    usage: Usage
    length: int = 0
    status: Status = Status.WAITING
    position: int = 0
    node: Node | None = None
    shared: int = 0
    allocated: int = 0
    table: Slots = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    window: Slots = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    promoted: bool = False
    prompt_node: Node | None = None  # that ends where the prompt does, once that is computed
    claimed: Claimed | None = None  # other engines have been told that this one computes it
    calls: tuple[float, ...] = ()  # seconds that its session was away between earlier turns
    loading_pays: bool | None = None  # None: not decided yet
    window_start: int = 0
    window_shared: int = 0
    window_spare: list[Slots] = field(default_factory=list)
    spare: Slots | None = None
    live_row: int | None = None
    stops: list[int] = field(default_factory=list)
    started: bool = False
    counted: int = 0  # prompt tokens that its usage has as reused or as computed
    cancelled: bool = False
    returns_checked: bool = False

    @property
    def known_tokens(self) -> Tokens:
        """All tokens so far: the prompt and what was generated."""
        return self.tokens[: self.length]

    @property
    def prefilling(self) -> bool:
        """More than one token is still to be fed before the next can be chosen, or the prompt is not done."""
        return self.position < self.prompt_end or self.length - self.position > 1

    def append(self, token: int) -> None:
        self.tokens[self.length] = token
        self.length += 1

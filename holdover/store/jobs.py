"""Jobs of the store, what becomes of them, and what is said about it. Plain data."""

from dataclasses import dataclass, field
from enum import Enum

from holdover.state.address import AddressChain, Tokens
from holdover.state.node import Node, Saved
from holdover.state.pool import Slots
from holdover.state.segment import Kind, SegmentHeader


@dataclass(frozen=True, slots=True)
class PrefixContext:
    """Whose state it is. tokens: from position 0, at least as far as is spoken of. session: the client's own name
    for its session, if it gave one."""

    fingerprint: str
    space: bytes
    chain: AddressChain
    tokens: Tokens
    session: str | None


@dataclass(eq=False, slots=True)
class SaveJob:
    """One segment to be saved. slots: of its rows, window rows or snapshot. node: leased until the job is done. again:
    how often it was submitted before, and came to a tier before what it goes on from did."""

    context: PrefixContext
    saved: Saved
    header: SegmentHeader
    slots: Slots
    node: Node
    again: int = 0

    @property
    def own_tokens(self) -> Tokens:
        """Ids that the segment itself holds: those of its rows."""
        return self.context.tokens[self.header.start : self.header.end]

    @property
    def prefix(self) -> Tokens:
        """All tokens from position 0 to the segment's end."""
        return self.context.tokens[: self.header.end]


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """A segment to be removed from tiers."""

    name: str
    tiers: frozenset[str]


@dataclass(frozen=True, slots=True)
class UnclaimJob:
    """A note to be taken away."""

    claimed: "Claimed"


@dataclass(frozen=True, slots=True)
class Found:
    """A segment that a tier was found to keep. tokens: ids of its rows (none for a snapshot)."""

    tier: str
    header: SegmentHeader
    tokens: Tokens


@dataclass(eq=False, slots=True)
class SaveDone:
    """A save is over. kept: tiers that now keep it, with the bytes put; evicted: (name, tier) that had to go; other:
    what a tier keeps in its place, as another engine has cut the same prefix elsewhere; stale: (name, tip as in its
    link, tier) of what the engine thinks is there, and is not, or is another engine's cut."""

    job: SaveJob
    kept: dict[str, int] = field(default_factory=dict)
    evicted: list[tuple[str, str]] = field(default_factory=list)
    state_bytes: int = 0
    other: Found | None = None
    stale: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class LoadPart:
    """Rows or window rows `[first, last)` (positions) of one saved segment, for one node. tokens: ids of the rows."""

    saved: Saved
    node: Node
    first: int
    last: int
    slots: Slots
    tokens: Tokens


class Change(Enum):
    """What a load found or did to a segment in a tier."""

    LOST = "lost"  # it proved missing or damaged
    UNREACHABLE = "unreachable"  # the tier could not be read
    PROMOTED = "promoted"  # it was copied there from a farther tier
    EVICTED = "evicted"  # it had to go for one that was promoted


@dataclass(frozen=True, slots=True)
class TierChange:
    """nbytes: put by a promotion, 0 if the segment was there already."""

    change: Change
    name: str
    tier: str
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class LoadJob:
    """What one sequence lacks on the device: rows and window rows for tree nodes, and a snapshot for its live row.

    changes: what happened to segments in the tiers on the way, in order.
    """

    parts: list[LoadPart]
    snapshot: Saved | None
    live_row: int
    owner: object
    changes: list[TierChange] = field(default_factory=list)
    submitted: float = 0.0  # by the store's clock

    @property
    def segments(self) -> list[Saved]:
        """Everything that is read, each once."""
        snapshot = [] if self.snapshot is None else [self.snapshot]
        return list(dict.fromkeys([*(part.saved for part in self.parts), *snapshot]))


@dataclass(eq=False, slots=True)
class LoadDone:
    """A load is over. ok: all of it is in place. seconds: since it was asked for. tier_of: where each segment came
    from, by its name."""

    job: LoadJob
    ok: bool = True
    seconds: float = 0.0
    tier_of: dict[str, str] = field(default_factory=dict)
    bytes_by_tier: dict[str, int] = field(default_factory=dict)

    def tokens_by_tier(self, first: int = 0, last: int | None = None) -> dict[str, int]:
        """How many tokens' rows of positions `[first, last)` came from each tier."""
        result: dict[str, int] = {}
        for part in self.job.parts:
            end = part.last if last is None else min(part.last, last)
            if part.saved.kind is Kind.ROWS and part.saved.name in self.tier_of and end > max(part.first, first):
                tier = self.tier_of[part.saved.name]
                result[tier] = result.get(tier, 0) + end - max(part.first, first)
        return result


@dataclass(eq=False, slots=True)
class PromoteJob:
    """What a request will load, to be copied into the nearer tiers before."""

    segments: list[Saved]
    changes: list[TierChange] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PromoteDone:
    """A promotion is over; what it did is in the job's changes."""

    job: PromoteJob


@dataclass(eq=False, slots=True)
class FindJob:
    """What shared tiers may know of a request's prompt and its engine does not.

    known: rows of the prompt that each tier is known to keep, from position 0 on, with the position up to which they
    are the prompt's; it is asked for what follows. resume: from where the request can go on as it is. boundaries:
    positions where a snapshot may lie, besides ends of segments.
    deadline: the request waits no longer than that, by the store's clock. claim_from: if at least so many tokens are
    kept nowhere, leave a note that they are being computed; None for none. since: when it was first asked about;
    awaited: how many tokens of it another engine was computing at most.
    """

    context: PrefixContext
    known: dict[str, list[tuple[Saved, int]]]
    resume: int
    boundaries: list[int]
    deadline: float = 0.0
    claim_from: int | None = None
    since: float = 0.0
    awaited: int = 0


@dataclass(eq=False, slots=True)
class FindDone:
    """Everything that was found, of each tier in the order of positions. claimed: what this engine has left a note of;
    elsewhere: tokens of the prompt that another engine is computing."""

    job: FindJob
    found: list[Found] = field(default_factory=list)
    claimed: "Claimed | None" = None
    elsewhere: int = 0


@dataclass(frozen=True, slots=True)
class Claimed:
    """A note that was left: under the name of a segment, in a tier."""

    name: str
    tier: str


Done = SaveDone | LoadDone | FindDone | PromoteDone

"""What the prefix tree is made of: nodes, the saved segments that they refer to, and matches."""

from dataclasses import dataclass, field

import numpy as np

from holdover.state.address import Tokens
from holdover.state.pool import Slots
from holdover.state.segment import Kind, segment_name


@dataclass(eq=False, slots=True)
class Saved:
    """A segment that tiers keep, or are about to. After a split, both halves refer to the one segment over them.

    pending: copies into tiers that are under way; while there are any, nobody else saves the same state. unreachable:
    tiers that keep it but could not be read: it is not loaded from there for now, and not saved there again either.
    failures: how often it could not be read since it was last loaded.
    """

    kind: Kind
    address: bytes
    start: int
    end: int
    tiers: set[str] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)
    pending: int = 0
    failures: int = 0

    @property
    def name(self) -> str:
        return segment_name(self.kind, self.address)


@dataclass(eq=False, slots=True)
class Node:
    """Tokens `[start, end)` of one prefix.

    packed: the tokens as bytes, for comparing. leases: sequences and copies that may read the rows; snapshot_leases:
    copies that may read the kept snapshot. loading: the load that will fill this node's rows, while it runs (its
    sequence leases the node). generated: a response that no prompt has contained so far. boundary: a message boundary,
    kept when thinning. device_children, generated_children: how many of the children are on the device, generated.
    """

    parent: "Node | None"
    packed: bytes
    start: int
    space: bytes
    tokens: Tokens = field(init=False)
    children: dict[int, "Node"] = field(default_factory=dict)
    slots: Slots | None = None
    rows: Saved | None = None
    snapshot_slots: Slots | None = None
    snapshot: Saved | None = None
    leases: int = 0
    snapshot_leases: int = 0
    loading: object | None = None
    generated: bool = False
    boundary: bool = False
    device_children: int = 0
    generated_children: int = 0
    last_used: int = 0

    def __post_init__(self) -> None:
        self.tokens = np.frombuffer(self.packed, dtype="<u4")

    @property
    def evictable(self) -> bool:
        """Whether the rows can leave the device now: nobody reads them, and no child's rows depend on them."""
        return self.leases == 0 and self.device_children == 0 and self.slots is not None

    @property
    def superseded(self) -> bool:
        """Whether the snapshot is on the device and a newer one of the same chain makes it nearly useless."""
        return self.snapshot_slots is not None and len(self.children) == 1 and not self.boundary

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def rows_available(self) -> bool:
        return self.slots is not None or (self.rows is not None and bool(self.rows.tiers)) or len(self.tokens) == 0

    @property
    def snapshot_available(self) -> bool:
        return self.snapshot_slots is not None or (self.snapshot is not None and bool(self.snapshot.tiers))


@dataclass(frozen=True, slots=True)
class Match:
    """How far a token sequence is known.

    known: tokens that some sequence had in common. position: tokens that need no compute, because every kind of state
    is whole there. node: where `position` lies; it ends there, or (only for models that resume anywhere) covers it.
    followed_response: whether the tokens go on along a kept response, or (False) turn away where one begins; None if
    they meet none.
    """

    known: int
    position: int
    node: Node
    followed_response: bool | None = None


def common_length(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that are equal."""
    length = min(len(a), len(b))
    if length == 0 or a[0] != b[0]:
        return 0
    unequal = a[:length] != b[:length]
    first = int(unequal.argmax())
    return first if unequal[first] else length


def path_to(node: Node) -> list[Node]:
    """Nodes from below the root to `node`."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]

"""What the prefix tree is made of: nodes, the saved segments that they refer to, and matches."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from holdover.state.address import Tokens
from holdover.state.layout import Layout
from holdover.state.pool import Slots
from holdover.state.segment import Kind, segment_name


@dataclass(eq=False, slots=True)
class Saved:
    """A segment that tiers keep, or are about to. After a split, both halves refer to the one segment over them.

    tip: address of position `end`; rows_tip: of a window, that of the rows segment that holds its tokens. pending:
    copies into tiers that are under way, and loads, which may make some; while there are any, nobody else saves the
    same state. unreachable: tiers that keep it but could not be read: it is not loaded from there for now, and not
    saved there again either. failures: how often it could not be read since it was last loaded.
    """

    kind: Kind
    address: bytes
    start: int
    end: int
    tip: bytes = b""
    rows_tip: bytes = b""
    tiers: set[str] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)
    pending: int = 0
    failures: int = 0
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = segment_name(self.kind, self.address)

    @property
    def cut(self) -> tuple[int, int, bytes, bytes]:
        """What tells it apart from another segment of its name."""
        return self.start, self.end, self.tip, self.rows_tip


@dataclass(eq=False, slots=True)
class Node:
    """Tokens `[start, end)` of one prefix.

    packed: the tokens as bytes, for comparing. window: window rows on the device, those of the node's last tokens,
    int64 [rows, slots_per_window_row]; windows_saved: segments that hold window rows of it, the last first. leases:
    sequences and copies that may read the rows; snapshot_leases: copies that may read the kept snapshot. loading: the
    load that will fill this node's rows, while it runs (its sequence leases the node). generated: a response that no
    prompt has contained so far. boundary: a message boundary, kept when thinning. device_children, generated_children:
    how many of the children are on the device, generated.
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
    window: Slots | None = None
    windows_saved: list[Saved] = field(default_factory=list)
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

    @property
    def window_start(self) -> int:
        """Position of the first window row that is on the device; the node's end if none is."""
        return self.end - (0 if self.window is None else len(self.window))

    def window_to_load(self, first: int) -> list[tuple[Saved, int, int]]:
        """What makes the window rows whole from position `first` on: (segment, first, last) of each part that is not
        on the device, the last part first. Ends where no tier goes on."""
        parts = []
        first, start = max(first, self.start), self.window_start
        for saved in self.windows_saved:
            if start > first and saved.tiers and saved.start < start <= saved.end:
                parts.append((saved, max(saved.start, first), start))
                start = parts[-1][1]
        return parts

    def window_before(self, position: int) -> Saved | None:
        """The window segment that ends at `position`, which lies in the node or where it starts."""
        holder = self if position > self.start or self.parent is None else self.parent
        return next((saved for saved in holder.windows_saved if saved.end == position), None)

    @property
    def window_from(self) -> int:
        """First position from which the window rows are whole up to the node's end, on the device or saved."""
        parts = self.window_to_load(self.start) if self.windows_saved else ()
        return parts[-1][1] if parts else self.window_start


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


def live_windows(node: Node, layout: Layout) -> Iterator[tuple[Node, int]]:
    """From `node` up to the root's child: each node with the first position of it whose window row is still of use.

    A row is of use to whoever goes on where `node` ends, at a kept snapshot, or below a branch: a window of rows before
    such a position, with the beginning of their block, and all from there on to the next.
    """
    live = layout.window_first(node.end)
    while node.parent is not None:
        if node.snapshot_available or len(node.children) > 1:
            live = layout.window_first(node.end)
        yield node, max(node.start, live)
        node = node.parent

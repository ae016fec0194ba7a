"""Finding what other engines, or this one before it was restarted, have saved of a prompt: prefix by prefix, with no
list of all that a tier keeps.

Segments of rows and windows are named by the address just behind their first token. So whoever knows that a tier keeps
`[0, p)` of a prompt knows the one name under which what follows can lie there. See docs/design/sharing.md.
"""

import logging
from typing import NamedTuple

import numpy as np

from holdover.state.layout import Layout
from holdover.state.node import common_length
from holdover.state.segment import DamagedSegment, Kind, Link, parse_header, segment_bytes, segment_name
from holdover.store.jobs import FindJob, Found, PrefixContext
from holdover.store.tier import Tier

log = logging.getLogger(__name__)
HEAD_BYTES = 8192
MOST_SNAPSHOT_PROBES = 16


def look(tier: Tier, name: str, link: Link, context: PrefixContext, head: bytes | None = None) -> Found | None:
    """What a tier keeps of a prefix under a name, from its head alone; None if it is nothing that can be used. link:
    names the parent that it must have. head: if it was read before.

    The ids of rows are checked against the segment's own address, and so is its header; the checksum over everything is
    checked when it is loaded. Raises TierError.
    """
    try:
        if head is None:
            head = tier.head(name, HEAD_BYTES, link.parent)
        if head is None:
            return None
        header, _, data_start, _ = parse_header(head)
        expected = (name, link[1:], context.fingerprint, context.space)
        if (header.name, header.link[1:], header.fingerprint, header.space) != expected:
            raise DamagedSegment("it is another's, kept under this name")
        if header.kind is Kind.SNAPSHOT:
            return Found(tier.name, header, np.empty(0, dtype="<u4"))
        needed = data_start + 4 * (header.end - header.start)
        if needed > len(head):
            head = tier.head(name, needed, link.parent) or b""
        ids = np.frombuffer(head[data_start:needed], dtype="<u4") if needed <= len(head) else np.empty(0, "<u4")
        whole = np.concatenate([context.tokens[: header.start], ids])
        chain = context.chain.fork(header.start, whole)
        if len(whole) != header.end or chain.address(header.end) != header.tip:
            raise DamagedSegment("its token ids are not those that its address says")
        return Found(tier.name, header, ids)
    except DamagedSegment as error:
        log.warning("can't use %s of the %s tier: %s", name, tier.name, error)
        return None


class Reach(NamedTuple):
    """How far a tier brings a request. state: up to which position it keeps all that it takes to go on, as far as that
    is known; new_rows: names of rows of the prompt that were not known before."""

    state: int
    new_rows: list[str]


def find(tier: Tier, job: FindJob, layout: Layout) -> tuple[list[Found], Reach]:
    """What a tier keeps of a prompt beyond what is known: rows, then the last snapshot to go on from, then its window.

    Enters all of it in the tier's books. Raises TierError.
    """
    search = _Search(tier, job, layout)
    found = search.run()
    state = search.position
    if not layout.resumes_anywhere:
        snapshots = [each.header.end for each in found if each.header.kind is Kind.SNAPSHOT]
        state = snapshots[0] if snapshots else min(state, job.resume)
    return found, Reach(state, [each.header.name for each in found if each.header.kind is Kind.ROWS])


class _Search:
    """One prompt in one tier. rows: (name, tip, position up to which it is the prompt's) from position 0 on; each
    begins where the one before it ceases to be the prompt's."""

    def __init__(self, tier: Tier, job: FindJob, layout: Layout) -> None:
        self.tier = tier
        self.job = job
        self.layout = layout
        self.tokens = job.context.tokens
        self.heads: dict[str, bytes] | None = None  # that were read ahead
        self.rows = [(saved.name, saved.tip, end) for saved, end in job.known[tier.name]]

    @property
    def position(self) -> int:
        """How far the tier is known to keep the prompt's rows."""
        return self.rows[-1][2] if self.rows else 0

    def run(self) -> list[Found]:
        found: list[Found] = []
        while self.position < len(self.tokens):
            each = self._look(Kind.ROWS, self.position, self._link(self.position))
            if each is None:
                break
            shared = common_length(each.tokens, self.tokens[self.position :])
            self.rows.append((each.header.name, each.header.tip, self.position + shared))
            found.append(each)
            if self.heads is None:
                self._read_ahead()
        for end in self._snapshot_positions() if self.layout.snapshot_fields else ():
            snapshot = self._look(Kind.SNAPSHOT, end, self._link(end))
            window = self._window(end) if snapshot is not None else None
            if snapshot is not None and window is not None:
                return [*found, snapshot, *window]
        return found

    def _read_ahead(self) -> None:
        """One hit, and the tier's books say where its chain goes on: a name for each position, and those that are in
        the books. So a long chain in a bucket takes a few round trips, not one for each segment."""
        address = self.job.context.chain.address
        names = (segment_name(Kind.ROWS, address(at + 1)) for at in range(self.position, len(self.tokens)))
        self.heads = self.tier.heads(names, HEAD_BYTES)

    def _link(self, position: int) -> Link:
        """To the rows segment that holds token `position - 1`."""
        rows = ((name, tip) for name, tip, last in self.rows if last >= position > 0)
        name, tip = next(rows, (None, self.job.context.space))
        return Link("", name, tip.hex())

    def _snapshot_positions(self) -> list[int]:
        """Where a snapshot may lie that is worth more than what the request can go on from, the farthest first."""
        known, resume = self.position, self.job.resume
        if self.layout.resumes_anywhere:  # only the last hidden vector is of use, and only at the very end
            return [known] if known == len(self.tokens) > resume else []
        places = {*(end for _, _, end in self.rows), *self.job.boundaries}
        return sorted((each for each in places if resume < each <= known), reverse=True)[:MOST_SNAPSHOT_PROBES]

    def _window(self, end: int) -> list[Found] | None:
        """The window rows that it takes to go on at `end`; None if the tier does not have them all."""
        found: list[Found] = []
        position = self.layout.window_first(end) if self.layout.window else end
        link = self._link(position + 1)
        while position < end:
            each = self._look(Kind.WINDOW, position, link)
            if each is None:
                return None
            found.append(each)
            position += common_length(each.tokens, self.tokens[position:])
            rows_end = position in {last for _, _, last in self.rows}
            if rows_end or position % self.layout.window_block == 0:
                link = self._link(position + 1)
            elif position < end and position < each.header.end:  # its rows would end here too
                return None
            else:
                link = Link("", each.header.name, each.header.link.tip)
        return found

    def _look(self, kind: Kind, position: int, link: Link) -> Found | None:
        """What begins (a snapshot: lies) at a position."""
        context = self.job.context
        named_at = position if kind is Kind.SNAPSHOT else position + 1
        name = segment_name(kind, context.chain.address(named_at))
        found = look(self.tier, name, link, context, None if self.heads is None else self.heads.pop(name, None))
        if found is None or found.header.start != position:
            return None
        nbytes = segment_bytes(found.header, self.layout)
        return found if self.tier.adopt(found.header.name, nbytes, found.header.link) else None

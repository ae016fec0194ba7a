"""Finding what other engines, or this one before it was restarted, have saved of a prompt: prefix by prefix, with no
list of all that a tier keeps.

Rows segments are named by the address just behind their first token. So whoever knows that a tier keeps `[0, p)` of a
prompt knows the one name under which what follows can lie there. See docs/design/sharing.md.
"""

import logging

import numpy as np

from holdover.state.address import Tokens
from holdover.state.layout import Layout
from holdover.state.node import common_length
from holdover.state.segment import DamagedSegment, Kind, SegmentHeader, parse_header, segment_bytes, segment_name
from holdover.store.jobs import FindJob, Found
from holdover.store.tier import Tier

log = logging.getLogger(__name__)
HEAD_BYTES = 8192
MOST_SNAPSHOT_PROBES = 16


def look(tier: Tier, name: str, fingerprint: str, space: bytes) -> Found | None:
    """What a tier keeps under a name, from its head alone; None if it is nothing that can be used.

    The checksum is checked when it is loaded. Raises TierError.
    """
    head = tier.head(name, HEAD_BYTES)
    if head is None:
        return None
    try:
        header, _, data_start, _ = parse_header(head)
        if (header.name, header.fingerprint, header.space) != (name, fingerprint, space):
            raise DamagedSegment("it is another's, kept under this name")
        if header.kind is not Kind.ROWS:
            return Found(tier.name, header, np.empty(0, dtype="<u4"))
        needed = data_start + 4 * (header.end - header.start)
        if needed > len(head):
            head = tier.head(name, needed) or b""
        if needed > len(head):
            raise DamagedSegment("its token ids are cut off")
        return Found(tier.name, header, np.frombuffer(head[data_start:needed], dtype="<u4"))
    except DamagedSegment as error:
        log.warning("can't use %s of the %s tier: %s", name, tier.name, error)
        return None


def find(tier: Tier, job: FindJob, layout: Layout) -> list[Found]:
    """What a tier keeps of a prompt beyond what is known: rows, then the last snapshot to go on from, then its window.

    Enters all of it in the tier's books. Raises TierError.
    """
    position = job.from_positions[tier.name]
    found: list[Found] = []
    ends = {position}
    while position < len(job.tokens):
        each = _look_and_adopt(tier, job, Kind.ROWS, position + 1, layout)
        if each is None or each.header.start != position:
            break
        position += common_length(each.tokens, job.tokens[position:])
        found.append(each)
        ends.add(position)
    if not layout.snapshot_fields:
        return found
    for end in _snapshot_positions(job, ends, position, layout):
        snapshot = _look_and_adopt(tier, job, Kind.SNAPSHOT, end, layout)
        if snapshot is not None:
            window = _find_window(tier, job, end, layout)
            if window is not None:
                return [*found, snapshot, *window]
    return found


def _snapshot_positions(job: FindJob, ends: set[int], known: int, layout: Layout) -> list[int]:
    """Where a snapshot may lie that is worth more than what the request can go on from, the farthest first."""
    if layout.resumes_anywhere:  # only the last hidden vector is of use, and only at the very end
        return [known] if known == len(job.tokens) > job.resume else []
    places = {*ends, *job.boundaries}
    return sorted((each for each in places if job.resume < each <= known), reverse=True)[:MOST_SNAPSHOT_PROBES]


def _find_window(tier: Tier, job: FindJob, end: int, layout: Layout) -> list[Found] | None:
    """The window rows that it takes to go on at `end`; None if the tier does not have them all."""
    found: list[Found] = []
    first = max(0, end - layout.window)
    while layout.window and end > first:
        each = _look_and_adopt(tier, job, Kind.WINDOW, end, layout)
        if each is None:
            return None
        found.append(each)
        end = each.header.start
    return found


def _look_and_adopt(tier: Tier, job: FindJob, kind: Kind, position: int, layout: Layout) -> Found | None:
    found = look(tier, segment_name(kind, job.chain.address(position)), job.fingerprint, job.space)
    if found is None or not _makes_sense(found.header, position, job.tokens, found.tokens):
        return None
    header = found.header
    return found if tier.adopt(header.name, segment_bytes(header, layout), header.parent_name) else None


def _makes_sense(header: SegmentHeader, position: int, prompt: Tokens, tokens: Tokens) -> bool:
    if header.kind is not Kind.ROWS:
        return header.end == position
    return header.start == position - 1 and len(tokens) > 0 and tokens[0] == prompt[position - 1]

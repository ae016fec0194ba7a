"""What a tier kept through a restart, put back into the tree from the headers alone."""

import logging
from dataclasses import dataclass, field

import numpy as np

from holdover.errors import TierError
from holdover.state.address import Tokens
from holdover.state.node import Saved, path_to
from holdover.state.segment import DamagedSegment, Kind, OtherFormat, SegmentHeader, parse_header
from holdover.state.tree import PrefixTree
from holdover.store.objects import ObjectTier

log = logging.getLogger(__name__)
HEAD_BYTES = 4096


@dataclass(slots=True)
class Recovery:
    """How many segments were found, are of another model or format, or could not be used and were removed: they are no
    segments, or a part of their prefix is gone. left_behind: those of them that could not be removed now.
    """

    rows: int = 0
    snapshots: int = 0
    windows: int = 0
    foreign: int = 0
    unusable: int = 0
    left_behind: list[str] = field(default_factory=list)


def recover(tree: PrefixTree, tier: ObjectTier, fingerprint: str) -> Recovery:
    """Add to the tree what `tier` keeps for this model. Checksums are checked when a segment is loaded."""
    result = Recovery()
    rows: dict[bytes, list[tuple[SegmentHeader, Tokens]]] = {}
    snapshots: list[SegmentHeader] = []
    windows: list[SegmentHeader] = []
    for name in list(tier.scan()):
        try:
            header, tokens = _read(tier, name)
        except OtherFormat:
            result.foreign += 1
            continue
        except (DamagedSegment, TierError) as error:
            log.warning("left out %s of the %s tier: %s", name, tier.name, error)
            _remove(tier, name, result)
            continue
        if header.fingerprint != fingerprint:
            result.foreign += 1
        elif header.kind is Kind.ROWS:
            rows.setdefault(header.parent, []).append((header, tokens))
        elif header.kind is Kind.WINDOW:
            windows.append(header)
        else:
            snapshots.append(header)
    known = ((node.rows, node) for node in tree.nodes())  # of tiers that were read before this one
    ends = {saved.address: node for saved, node in known if saved is not None and saved.end == node.end}
    unusable: list[SegmentHeader] = []
    todo = [parent for parent in rows if parent in ends or any(header.space == parent for header, _ in rows[parent])]
    while todo:
        parent_address = todo.pop()
        for header, tokens in rows.pop(parent_address, []):
            before = tree.root(header.space) if parent_address == header.space else ends.get(parent_address)
            if before is None or before.end < header.start:
                unusable.append(header)
                continue
            parent = tree.split_at(before, header.start)
            saved = Saved(Kind.ROWS, header.address, header.start, header.end)
            ends[header.address] = tree.graft(parent, tokens, saved, tier.name)
            result.rows += 1
            todo.append(header.address)
    for header in snapshots:
        last = ends.get(header.parent)
        if last is None or not any(each.start < header.end <= each.end for each in path_to(last)):
            unusable.append(header)
            continue
        node = tree.split_at(last, header.end)
        saved = Saved(Kind.SNAPSHOT, header.address, header.end, header.end)
        tree.saved.register(saved, [node])
        tree.saved.kept(saved.name, tier.name)
        result.snapshots += 1
    for header in windows:
        last = ends.get(header.parent)
        held = [each for each in path_to(last) if each.start < header.end and header.start < each.end] if last else []
        if not held or held[-1].end < header.end:
            unusable.append(header)
            continue
        saved = Saved(Kind.WINDOW, header.address, header.start, header.end)
        tree.saved.register(saved, held)
        tree.saved.kept(saved.name, tier.name)
        result.windows += 1
    unusable += [header for left in rows.values() for header, _ in left]
    for header in unusable:
        _remove(tier, header.name, result)
    return result


def _remove(tier: ObjectTier, name: str, result: Recovery) -> None:
    result.unusable += 1
    try:
        tier.delete(name)
    except TierError as error:
        log.warning("%s could not be removed: %s", name, error)
        result.left_behind.append(name)


def _read(tier: ObjectTier, name: str) -> tuple[SegmentHeader, Tokens]:
    head = tier.head(name, HEAD_BYTES)
    header, _, data_start, _ = parse_header(head)
    if header.name != name:
        raise DamagedSegment("it is kept under the name of another")
    if header.kind is not Kind.ROWS:
        return header, np.empty(0, dtype="<u4")
    needed = data_start + 4 * (header.end - header.start)
    if needed > len(head):
        head = tier.head(name, needed)
    tokens = np.frombuffer(head[data_start:needed], dtype="<u4")
    if len(tokens) != header.end - header.start:
        raise DamagedSegment("its token ids are cut off")
    return header, tokens

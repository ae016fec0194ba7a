"""What a folder or bucket holds, seen from outside: for tools that look at it, check it and clean it up.

Everything here reads the place itself, and needs neither the model nor the process that saved it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from holdover.errors import TierError
from holdover.state.address import AddressChain, Tokens, address_key
from holdover.state.segment import DamagedSegment, Kind, OtherFormat, SegmentHeader, check_whole, parse_header
from holdover.store.ledger import parent_digits
from holdover.store.objects import object_path, parse_path
from holdover.store.place import Item, Place

HEAD_BYTES = 8192
GONE = "it went while it was looked for"
Tell = Callable[[int], None]  # told how many more are done


class GoneSegment(DamagedSegment):
    """An engine has evicted it since the place was listed."""


@dataclass(slots=True)
class Entry:
    """An object of a place. header: None if it has not been read, or can't be; problem: why it is of no use."""

    item: Item
    name: str
    parent: str | None
    header: SegmentHeader | None = None
    problem: str = ""

    @property
    def kind(self) -> str:
        return self.name.rsplit(".", 1)[-1]


@dataclass(slots=True)
class Catalog:
    """All segments of a place by name, and what else lies among them. foreign: objects that are no segments of this
    version; children: names by what stands for their parent."""

    entries: dict[str, Entry] = field(default_factory=dict)
    foreign: list[Item] = field(default_factory=list)
    children: dict[str, list[str]] = field(default_factory=dict)
    parents: dict[str, Entry] = field(default_factory=dict)  # rows and windows, by what stands for them

    @property
    def rows(self) -> list[Entry]:
        return [entry for entry in self.parents.values() if entry.kind == Kind.ROWS.value]

    def parent_of(self, entry: Entry) -> Entry | None:
        return None if entry.parent is None else self.parents.get(entry.parent)

    def path(self, entry: Entry) -> list[Entry]:
        """Segments from position 0 to `entry`, each the parent of the next."""
        path = [entry]
        while (parent := self.parent_of(path[-1])) is not None and len(path) <= len(self.entries):
            path.append(parent)
        return path[::-1]

    def below(self, entry: Entry) -> list[Entry]:
        """Everything that goes on from an entry, directly or not."""
        found = [self.entries[name] for name in self.children_of(entry)]
        for each in found:  # which grows
            found += [self.entries[name] for name in self.children_of(each)]
        return found

    def children_of(self, entry: Entry) -> list[str]:
        return self.children.get(parent_digits(entry.name) or "", [])

    def orphans(self) -> list[Entry]:
        """What goes on, directly or not, from a segment that is not there."""
        lost = [e for e in self.entries.values() if e.parent is not None and e.parent not in self.parents]
        return [each for entry in lost for each in (entry, *self.below(entry))]

    def leaves(self) -> list[Entry]:
        """The last rows segment of each history, the most recently written first."""
        last = [
            entry
            for entry in self.rows
            if not any(self.entries[name].kind == Kind.ROWS.value for name in self.children_of(entry))
        ]
        return sorted(last, key=lambda entry: -entry.item.modified)


def read_catalog(place: Place, tell: Tell = lambda _: None) -> Catalog:
    """List a place. Engines may be writing to it: what seems to go on from nothing is looked for in a second list.

    Raises TierError.
    """
    catalog = Catalog()
    _list_into(catalog, place, tell)
    if catalog.orphans():
        _list_into(catalog, place, lambda _: None)
    return catalog


def _list_into(catalog: Catalog, place: Place, tell: Tell) -> None:
    catalog.foreign = []
    for item in place.list():
        tell(1)
        found = parse_path(item.path)
        if found is None or item.path != object_path(*found):
            catalog.foreign.append(item)
            continue
        entry = Entry(item, *found)
        if entry.name in catalog.entries:
            continue
        catalog.entries[entry.name] = entry
        if (digits := parent_digits(entry.name)) is not None:
            catalog.parents[digits] = entry
        if entry.parent is not None:
            catalog.children.setdefault(entry.parent, []).append(entry.name)


def read_headers(place: Place, entries: Iterable[Entry], tell: Tell = lambda _: None) -> None:
    """Read the heads of segments. What can't be read has a problem afterwards. Raises TierError."""
    for entry in entries:
        tell(1)
        if entry.header is not None or entry.problem:
            continue
        try:
            head = place.read_start(entry.item.path, HEAD_BYTES)
            if head is None:
                entry.problem = GONE
            else:
                entry.header = parse_header(head)[0]
        except DamagedSegment as error:
            entry.problem = str(error)


def read_segment(place: Place, entry: Entry) -> torch.Tensor:
    """A segment's bytes, all of them checked. Raises GoneSegment, DamagedSegment, TierError."""
    buffer = place.read(entry.item.path)
    if buffer is None:
        raise GoneSegment(GONE)
    entry.header = check_whole(buffer, entry.name)
    parent = entry.header.parent_name
    if parent_digits(parent) != entry.parent:
        raise DamagedSegment("it lies under the name of another parent")
    return buffer


def segment_tokens(buffer: torch.Tensor) -> Tokens:
    """Token ids of a segment of rows or windows that has been checked."""
    header, _, start, _ = parse_header(buffer.numpy().data)
    return np.frombuffer(buffer.numpy().data[start : start + 4 * (header.end - header.start)], dtype="<u4")


@dataclass(slots=True)
class Verdict:
    """What `verify` found. broken: segments that would be refused; orphans: those that nobody can come to; other:
    of another format or not encrypted: left alone; addresses: how many names could be computed again from tokens."""

    segments: int = 0
    nbytes: int = 0
    addresses: int = 0
    broken: list[Entry] = field(default_factory=list)
    orphans: list[Entry] = field(default_factory=list)
    other: list[Item] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.broken and not self.orphans


def verify(place: Place, tell: Tell = lambda _: None, salt: str = "") -> Verdict:
    """Read everything and check it: checksums, names, and that each prefix is whole from its first token.

    Where a segment was saved without a salt, or with the one given, its address is computed anew from its tokens.
    Raises TierError.
    """
    catalog = read_catalog(place)
    verdict = Verdict(len(catalog.entries), sum(e.item.nbytes for e in catalog.entries.values()), other=catalog.foreign)
    chains: dict[str, tuple[AddressChain, Tokens]] = {}  # of segments that others go on from
    lost = {id(entry) for entry in catalog.orphans()}
    for entry in _parents_first(catalog):
        tell(1)
        try:
            buffer = read_segment(place, entry)
            verdict.addresses += _check_address(catalog, entry, buffer, chains, salt)
        except OtherFormat:
            verdict.other.append(entry.item)
            verdict.segments -= 1
            continue
        except GoneSegment:
            verdict.segments -= 1
            verdict.nbytes -= entry.item.nbytes
            continue
        except DamagedSegment as error:
            entry.problem = str(error)
            verdict.broken.append(entry)
            lost |= {id(each) for each in catalog.below(entry)}
        if id(entry) in lost and not entry.problem:
            verdict.orphans.append(entry)
        parent = catalog.parent_of(entry)
        if parent is not None and parent.name in chains and catalog.children[entry.parent or ""][-1] == entry.name:
            del chains[parent.name]  # its last child has been checked
    return verdict


def _parents_first(catalog: Catalog) -> Iterable[Entry]:
    """Depth first, so that few prefixes are held at a time."""
    roots = [e for e in catalog.entries.values() if e.parent is None or e.parent not in catalog.parents]
    seen: set[str] = set()
    stack = roots[::-1]
    while stack:
        entry = stack.pop()
        if entry.name in seen:
            continue
        seen.add(entry.name)
        yield entry
        stack += [catalog.entries[name] for name in catalog.children_of(entry)][::-1]


def _check_address(
    catalog: Catalog,
    entry: Entry,
    buffer: torch.Tensor,
    chains: dict[str, tuple[AddressChain, Tokens]],
    salt: str,
) -> bool:
    """Compute a segment's address from the tokens of its path. False if that can't be done. Raises DamagedSegment."""
    header = entry.header
    assert header is not None
    parent = catalog.parent_of(entry)
    rows = header.kind is not Kind.SNAPSHOT
    own = segment_tokens(buffer) if rows else np.empty(0, dtype="<u4")
    if parent is None:
        key = address_key(header.fingerprint, salt)
        if header.start != 0 or AddressChain(key, own).address(0) != header.space:
            return False
        chain, tokens = AddressChain(key, own), own
    elif parent.name in chains and parent.header is not None:
        if parent.header.link.tip != header.link.parent_tip:
            raise DamagedSegment("it goes on from another segment of its parent's name")
        before, all_before = chains[parent.name]
        first = header.start if rows else parent.header.end
        tokens = np.concatenate([all_before[:first], own])
        chain = before.fork(min(first, len(all_before)), tokens)
    else:
        return False
    if header.end > len(tokens) or chain.address(header.end) != header.tip:
        raise DamagedSegment("its tokens are not those that its address says")
    if chain.address(header.start + 1 if rows else header.end) != header.address:
        raise DamagedSegment("its name is not the address of its tokens")
    if catalog.children_of(entry):
        chains[entry.name] = (chain, tokens)
    return True


@dataclass(frozen=True, slots=True)
class History:
    """One chain of rows from position 0, with what was saved along it."""

    leaf: Entry
    path: list[Entry]

    @property
    def header(self) -> SegmentHeader:
        assert self.leaf.header is not None
        return self.leaf.header

    @property
    def nbytes(self) -> int:
        """Of its rows; others may share them."""
        return sum(entry.item.nbytes for entry in self.path)


def histories(place: Place, catalog: Catalog, tell: Tell = lambda _: None) -> list[History]:
    """Each history that begins at position 0, the most recently written first. Raises TierError."""
    leaves = catalog.leaves()
    read_headers(place, leaves, tell)
    found = [History(leaf, catalog.path(leaf)) for leaf in leaves if leaf.header is not None]
    return [history for history in found if history.path[0].parent is None]


def find_history(place: Place, catalog: Catalog, wanted: str) -> list[Entry]:
    """The segments of one session: of the longest history that it saved, or of the one whose segment's name begins so.

    Returns rows in order, then the snapshots and windows that go on from them. Raises TierError if there is none, or
    more than one.
    """
    by_name = [entry for entry in catalog.rows if len(wanted) >= 6 and entry.name.startswith(wanted.lower())]
    if len(by_name) > 1:
        raise TierError(
            f"{len(by_name)} segments in {place.shown} have names that begin with {wanted}; give more digits."
        )
    if not by_name:
        read_headers(place, catalog.rows)
        own = [e for e in catalog.rows if e.header is not None and e.header.session == wanted]
        if not own:
            raise TierError(
                f"{place.shown} has nothing of a session {wanted!r}, and no segment whose name begins so. "
                "`holdover store ls` shows what there is."
            )
        by_name = [max(own, key=lambda e: e.header.end if e.header is not None else 0)]
    path = catalog.path(by_name[0])
    if path[0].parent is not None:
        raise TierError(f"the beginning of {wanted} is not in {place.shown} any more.")
    others: list[Entry] = []
    for entry in path:
        children = (catalog.entries[name] for name in catalog.children_of(entry))
        along = [each for each in children if each.kind != Kind.ROWS.value]
        for each in along:  # which grows
            along += [catalog.entries[name] for name in catalog.children_of(each)]
        others += along
    return path + others


@dataclass
class Summary:
    """What `stats` says."""

    segments: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    tenants: int = 0
    sessions: int = 0
    histories: int = 0
    tokens: int = 0
    tokens_unshared: int = 0
    unreadable: int = 0
    orphans: int = 0
    foreign: int = 0
    oldest: float | None = None
    newest: float | None = None

    @property
    def sharing(self) -> float:
        """How many times the rows would lie there if each history had its own copy."""
        return self.tokens_unshared / self.tokens if self.tokens else 1.0


def summarize(place: Place, catalog: Catalog, tell: Tell = lambda _: None) -> Summary:
    """Count what is there. Raises TierError."""
    summary = Summary(foreign=len(catalog.foreign), orphans=len(catalog.orphans()))
    entries = list(catalog.entries.values())
    read_headers(place, entries, tell)
    spaces, sessions = set(), set()
    for entry in entries:
        summary.segments[entry.kind] += 1
        summary.nbytes[entry.kind] += entry.item.nbytes
        if entry.header is None:
            summary.unreadable += 1
            continue
        summary.models[entry.header.fingerprint] += 1
        spaces.add(entry.header.space)
        sessions.add(entry.header.session)
        if entry.kind == Kind.ROWS.value:
            summary.tokens += entry.header.end - entry.header.start
    for leaf in catalog.leaves():
        if leaf.header is not None:
            summary.histories += 1
            summary.tokens_unshared += leaf.header.end
    times = [entry.item.modified for entry in entries]
    summary.oldest, summary.newest = (min(times), max(times)) if times else (None, None)
    summary.tenants, summary.sessions = len(spaces), len(sessions - {""})
    return summary


def to_collect(
    catalog: Catalog,
    *,
    older_than: float | None = None,
    budget_bytes: int | None = None,
    keep_model: str | None = None,
    now: float | None = None,
) -> list[Entry]:
    """What `gc` removes: what nobody can come to, another model's, what is older than so many seconds, and then the
    oldest until the rest fits. A segment goes only with all that goes on from it. `keep_model` needs headers."""
    now = time.time() if now is None else now
    doomed = {entry.name: entry for entry in catalog.orphans()}
    for entry in catalog.entries.values() if keep_model is not None else ():
        if entry.header is not None and not entry.header.fingerprint.startswith(keep_model or ""):
            doomed[entry.name] = entry
    newest: dict[str, float] = {}  # of a segment and all that goes on from it
    leaves_first = list(_parents_first(catalog))[::-1]
    for entry in leaves_first:
        below = (newest[each] for each in catalog.children_of(entry))
        newest[entry.name] = max([entry.item.modified, *below])
    left = sorted((entry for entry in leaves_first if entry.name not in doomed), key=lambda e: newest[e.name])
    if older_than is not None:
        doomed |= {e.name: e for e in left if newest[e.name] < now - older_than}
    if budget_bytes is not None:
        left = [entry for entry in left if entry.name not in doomed]
        used = sum(entry.item.nbytes for entry in left)
        for entry in left:
            if used <= budget_bytes:
                break
            doomed[entry.name] = entry
            used -= entry.item.nbytes
    return list(doomed.values())

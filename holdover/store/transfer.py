"""One session's state as a file: taken out of one place, and put into another, however that one has cut it.

The file is an uncompressed tar of segments, parents first, each under its name. Names inside it are only compared:
where a segment goes, its own header says.
"""

import io
import os
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from holdover.errors import TierError
from holdover.state.address import AddressChain, Tokens, address_key
from holdover.state.node import common_length
from holdover.state.segment import DamagedSegment, Kind, SegmentHeader, check_whole, parse_header, reseal
from holdover.store.catalog import Entry, Tell, read_segment, segment_tokens
from holdover.store.objects import ObjectTier
from holdover.store.place import Place
from holdover.store.tier import PutStatus

PAX = tarfile.PAX_FORMAT


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner can read: it holds what agents said."""
    return os.open(path, flags, 0o600)


@dataclass(slots=True)
class Moved:
    """What an export or import did. kept: segments written; shared: those that were there already."""

    kept: int = 0
    shared: int = 0
    nbytes: int = 0
    tokens: int = 0
    refused: int = 0


def export_session(place: Place, segments: list[Entry], file: Path, tell: Tell = lambda _: None) -> Moved:
    """Write segments (rows in order, then the others) to a file. Raises TierError if any is damaged; then there is no
    file."""
    moved = Moved()
    staged = file.with_name(file.name + ".part")
    try:
        with open(staged, "wb", opener=_private) as target, tarfile.open(None, "w", target, format=PAX) as tar:
            for entry in segments:
                try:
                    buffer = read_segment(place, entry)
                except DamagedSegment as error:
                    raise TierError(
                        f"{entry.name} in {place.shown} is damaged: {error}. Run holdover store verify."
                    ) from None
                info = tarfile.TarInfo(entry.name)
                info.size, info.mtime, info.mode = len(buffer), int(entry.item.modified), 0o600
                tar.addfile(info, io.BytesIO(buffer.numpy().data))
                moved.kept += 1
                moved.nbytes += len(buffer)
                if entry.header is not None and entry.header.kind is Kind.ROWS:
                    moved.tokens = max(moved.tokens, entry.header.end)
                tell(len(buffer))
        staged.replace(file)
    except OSError as error:
        raise TierError(f"{file} can't be written ({error.strerror or error}).") from None
    finally:
        staged.unlink(missing_ok=True)
    return moved


def import_session(tier: ObjectTier, file: Path, tell: Tell = lambda _: None, salt: str = "") -> Moved:
    """Put an exported session into a tier: what it has of it already, also as part of other segments, stays one copy.

    salt: of the session's tenant, needed only where the tier has cut what they share elsewhere. Raises TierError.
    """
    importing = _Import(tier, salt)
    try:
        with tarfile.open(file, "r:") as tar:
            for info in tar:
                if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.sparse is not None:
                    raise TierError(f"{file} is no exported session: it holds something else than segments.")
                content = tar.extractfile(info)
                assert content is not None
                buffer = torch.frombuffer(bytearray(content.read()), dtype=torch.uint8)
                try:
                    importing.take(buffer, check_whole(buffer, info.name))
                except DamagedSegment as error:
                    raise TierError(f"{file}: {info.name[:80]} is damaged: {error}. Export it again.") from None
                tell(len(buffer))
    except (tarfile.TarError, OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise TierError(f"{file} can't be read as an exported session ({reason}).") from None
    return importing.moved


class _Import:
    """The rows of one history, as far as they have come, and where each lies in the tier."""

    def __init__(self, tier: ObjectTier, salt: str) -> None:
        self.tier = tier
        self.salt = salt
        self.moved = Moved()
        self.tokens: Tokens = np.empty(0, dtype="<u4")
        self.places: list[tuple[int, SegmentHeader]] = []  # rows in the tier, with the position up to which they count
        self.windows: list[tuple[int, SegmentHeader]] = []  # likewise

    def take(self, buffer: torch.Tensor, header: SegmentHeader) -> None:
        if header.kind is Kind.ROWS:
            self._take_rows(buffer, header)
            return
        if header.kind is Kind.WINDOW:
            self._take_window(buffer, header)
            return
        parent = self._holder(header.end)
        if parent is None or header.end > len(self.tokens):
            self.moved.refused += 1
            return
        self._put(buffer, replace(header, parent=parent.address, parent_tip=parent.tip))

    def _take_rows(self, buffer: torch.Tensor, header: SegmentHeader) -> None:
        ids = segment_tokens(buffer)
        if header.start != len(self.tokens) or (self.places and header.space != self.places[0][1].space):
            raise DamagedSegment("it does not go on from what comes before it in the file")
        self.tokens = np.concatenate([self.tokens, ids])
        self.moved.tokens = len(self.tokens)
        position, wanted = header.start, header
        while position < header.end:
            parent = self._holder(position)
            if parent is None and position:
                self.moved.refused += 1
                return
            link = (header.space, header.space) if parent is None else (parent.address, parent.tip)
            wanted = replace(wanted, parent=link[0], parent_tip=link[1])
            there = self._put(buffer, wanted)
            if there is None:
                return
            shared = self._shared(there, wanted)
            if not shared:  # it went while we looked
                self.moved.refused += 1
                return
            position += shared
            self.places.append((position, there))
            if position < header.end:
                chain = self._chain(header)
                wanted = replace(wanted, start=position, address=chain.address(position + 1))

    def _take_window(self, buffer: torch.Tensor, header: SegmentHeader) -> None:
        """Put in window rows, cut where the tier has cut the rows of their tokens."""
        if not np.array_equal(segment_tokens(buffer), self.tokens[header.start : header.end]):
            self.moved.refused += 1
            return
        position = header.start
        while position < header.end:
            inside = next((end for end, each in self.windows if each.start <= position < end), None)
            if inside is not None:
                position = inside
                self.moved.shared += 1
                continue
            rows_start, rows_end, parent = self._rows_of(position)
            in_chain = position > max(rows_start, position - position % header.block)
            if in_chain:
                parent = next((each for end, each in self.windows if end == position), None)
            if parent is None:
                self.moved.refused += 1
                return
            end = min(header.end, rows_end)
            wanted = replace(
                header, start=position, end=end, parent=parent.address, parent_tip=parent.tip, parent_window=in_chain,
                rows_tip=parent.rows_tip if in_chain else parent.tip,
            )  # fmt: skip
            if (position, end) != (header.start, header.end):
                chain = self._chain(header)
                wanted = replace(wanted, address=chain.address(position + 1), tip=chain.address(end))
            there = self._put(buffer, wanted)
            if there is None:
                return
            shared = self._shared(there, wanted)
            if not shared:  # it went while we looked
                self.moved.refused += 1
                return
            position += shared
            self.windows.append((position, there))

    def _rows_of(self, position: int) -> tuple[int, int, SegmentHeader | None]:
        """The rows segment in the tier that holds the token at a position, with the positions between which it does."""
        start = 0
        for end, header in self.places:
            if position < end:
                return start, end, header
            start = end
        return start, start, None

    def _chain(self, header: SegmentHeader) -> AddressChain:
        chain = AddressChain(address_key(header.fingerprint, self.salt), self.tokens)
        if chain.address(0) != header.space:
            raise TierError(
                f"{self.tier.place.shown} has cut what this session shares with others elsewhere, and the session was "
                "saved under a salt: give the salt that its requests had with --salt."
            )
        return chain

    def _holder(self, position: int) -> SegmentHeader | None:
        """The rows segment in the tier that holds token `position - 1`."""
        return next((header for end, header in self.places if end >= position > 0), None)

    def _shared(self, there: SegmentHeader, wanted: SegmentHeader) -> int:
        """How many tokens of what lies in place of `wanted` are the session's."""
        if there == wanted:
            return wanted.end - wanted.start
        return common_length(self._ids(there), self.tokens[wanted.start :])

    def _ids(self, header: SegmentHeader) -> Tokens:
        buffer = self.tier.place.read(self.tier.path_of(header))
        if buffer is None:
            return np.empty(0, dtype="<u4")
        return segment_tokens(buffer)

    def _put(self, buffer: torch.Tensor, wanted: SegmentHeader) -> SegmentHeader | None:
        """Write a segment. Returns what lies there under its name now, or None if there is no room."""
        made = buffer if wanted == parse_header(buffer.numpy().data)[0] else reseal(buffer, wanted)
        put = self.tier.put(wanted.name, len(made), lambda: made, wanted.link)
        if put.status is PutStatus.KEPT:
            self.moved.kept += 1
            self.moved.nbytes += len(made)
            return wanted
        if put.status is PutStatus.ALREADY_THERE:
            there = self.tier.place.read(self.tier.path_of(wanted))
            if there is not None:
                header = check_whole(there, wanted.name)
                self.tier.adopt(header.name, len(there), header.link)
                self.moved.shared += 1
                return header
        self.moved.refused += 1
        return None

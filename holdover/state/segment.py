"""Segments: saved state as one safetensors file each, complete and unaltered or refused.

A *rows* segment holds the token state of tokens `[start, end)` of one prefix, and these token ids; a *window* segment
their sliding-window rows, and the ids too. A *snapshot* segment holds the snapshot state at `end`. They are kept apart
because they live unlike lives: see docs/design/segments.md.
The format is in docs/format.md. Encoding makes one buffer and one copy; decoding makes none.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from xxhash import xxh3_128

from holdover.state.address import Tokens
from holdover.state.layout import ArraySpec, Layout

FORMAT = "holdover-segment/5"
NO_CHECKSUM = "0" * 32
CHECKSUM = re.compile("[0-9a-f]{32}")
BLOCK_BYTES = 256 << 10  # hashed and copied while they are in the processor's cache
MAX_HEADER_BYTES = 1 << 20
SAFETENSORS_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.int8: "I8",
}  # fmt: skip


class Kind(Enum):
    """What a segment holds."""

    ROWS = "rows"
    SNAPSHOT = "snapshot"
    WINDOW = "window"


class DamagedSegment(Exception):
    """Bytes that are no segment of this model, or not a whole one. The message says what is wrong."""


class OtherFormat(DamagedSegment):
    """A segment of a format that this version does not read: a miss, but not for it to remove."""


class Link(NamedTuple):
    """How a segment hangs together with others: its tip, and name and tip of the segment that it goes on from."""

    tip: str
    parent: str | None
    parent_tip: str


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Everything about a segment but its arrays.

    space: address of position 0, which names the model and the tenant. address: of rows and windows, of the prefix up
    to and with their first token (position `start + 1`); of a snapshot, of position `end`. parent: address of the
    segment that this one goes on from, or `space` if there is none: of rows and snapshots, the rows segment that holds
    token `start - 1`; of a window, the window segment of the same block and the same rows segment that ends at `start`
    (parent_window), else the rows segment that holds its tokens. tip: address of position `end`; parent_tip: the
    parent's, as another segment of the parent's name may end elsewhere. rows_tip: of a window, the tip of the rows
    segment that holds its tokens. A snapshot has start == end. block: of a window, the layout's `window_block`; it lies
    in one such block. session: the client's own name for the session that
    saved it, for people and tools only.
    """

    kind: Kind
    fingerprint: str
    space: bytes
    address: bytes
    parent: bytes
    parent_tip: bytes
    tip: bytes
    start: int
    end: int
    parent_window: bool = False
    block: int = 0
    rows_tip: bytes = b""
    session: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        return segment_name(self.kind, self.address)

    @property
    def link(self) -> Link:
        """How it hangs together with others."""
        parent_tip = link_tip(self.parent_tip, self.rows_tip if self.parent_window else b"")
        return Link(link_tip(self.tip, self.rows_tip).hex(), self.parent_name, parent_tip.hex())

    @property
    def parent_name(self) -> str | None:
        """Name of the segment that this one goes on from, if any."""
        kind = Kind.WINDOW if self.parent_window else Kind.ROWS
        return None if self.parent == self.space else segment_name(kind, self.parent)


def link_tip(tip: bytes, rows_tip: bytes) -> bytes:
    """What tells apart segments of one name: where each ends, and for windows also where their rows segment does. Of
    windows that lie in one block, those that were cut with other rows are no chain."""
    return bytes(a ^ b for a, b in zip(tip, rows_tip, strict=True)) if rows_tip else tip


def segment_name(kind: Kind, address: bytes) -> str:
    """The name under which every tier keeps a segment."""
    return f"{address.hex()}.{kind.value}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A decoded segment; its arrays are views of the buffer it was decoded from.

    tokens: uint32 [end - start] (none of snapshots). rows: uint8 [end - start, bytes_per_token] (rows segments) or [end
    - start, bytes_per_window_row] (window segments); snapshot: uint8 [bytes_per_snapshot] (snapshot segments).
    """

    header: SegmentHeader
    tokens: Tokens
    rows: torch.Tensor | None
    snapshot: torch.Tensor | None
    seal: "Seal"


@dataclass(frozen=True, slots=True)
class Seal:
    """What a segment's checksum is over: its header without it, and its data, here cut into rows of `row_bytes` after
    `before`, which is no row (the token ids)."""

    checksum: str
    blank: bytes
    before: memoryview
    rows: memoryview
    row_bytes: int

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
        """Ranges of rows, in order, each just after it was hashed: it is in the cache, so copying it is cheap.

        Raises DamagedSegment at the end if the checksum does not hold: nothing of what was copied may be used then.
        """
        digest = xxh3_128(self.blank)
        digest.update(self.before)
        count = len(self.rows) // self.row_bytes if self.row_bytes else 0
        step = max(1, block_bytes // max(1, self.row_bytes))
        for first in range(0, count, step):
            last = min(count, first + step)
            digest.update(self.rows[first * self.row_bytes : last * self.row_bytes])
            yield first, last
        if digest.hexdigest() != self.checksum:
            raise DamagedSegment("its checksum does not hold")

    def check(self) -> None:
        """Raises DamagedSegment if the checksum does not hold."""
        for _ in self.blocks(1 << 30):
            pass


@lru_cache(maxsize=64)
def _row_array(arrays: tuple[ArraySpec, ...], nbytes: int) -> tuple[str, int]:
    """Type and length of a row as other programs see it: the arrays' own type if they have one type only."""
    types = {spec.dtype for spec in arrays}
    if len(types) == 1 and nbytes % (dtype := types.pop()).itemsize == 0:
        return SAFETENSORS_NAMES[dtype], nbytes // dtype.itemsize
    return "U8", nbytes


def _arrays(layout: Layout, kind: Kind, num_tokens: int) -> dict[str, object]:
    """The safetensors entries that a segment of this layout must have, in the order of their bytes."""
    if kind is Kind.SNAPSHOT:
        return {
            part.spec.name: {
                "dtype": SAFETENSORS_NAMES[part.spec.dtype],
                "shape": list(part.spec.shape),
                "data_offsets": [part.start, part.start + part.spec.nbytes],
            }
            for part in layout.snapshot_fields
        }
    nbytes = state_bytes(layout, kind)
    dtype, length = _row_array(layout.window_arrays if kind is Kind.WINDOW else layout.token_arrays, nbytes)
    rows_start = num_tokens * 4
    return {
        "tokens": {"dtype": "U32", "shape": [num_tokens], "data_offsets": [0, rows_start]},
        "rows": {
            "dtype": dtype,
            "shape": [num_tokens, length],
            "data_offsets": [rows_start, rows_start + num_tokens * nbytes],
        },
    }


def _checksum_entry(checksum: str) -> bytes:
    """The checksum as it stands in a header."""
    return f'"checksum":"{checksum}"'.encode()


def data_bytes(layout: Layout, kind: Kind, num_tokens: int) -> int:
    """Bytes of a segment's arrays, without its header."""
    if kind is Kind.SNAPSHOT:
        return layout.bytes_per_snapshot
    return num_tokens * (4 + state_bytes(layout, kind))


@lru_cache(maxsize=256)
def _header_bytes(header: SegmentHeader, session: str, layout: Layout, checksum: str) -> bytes:
    """`session` is the header's own: it tells headers apart that are otherwise equal."""
    return _sealed_header(header, _arrays(layout, header.kind, header.end - header.start), checksum)


def _sealed_header(header: SegmentHeader, arrays: dict[str, object], checksum: str) -> bytes:
    metadata = {
        "format": FORMAT,
        "kind": header.kind.value,
        "fingerprint": header.fingerprint,
        "space": header.space.hex(),
        "address": header.address.hex(),
        "parent": header.parent.hex(),
        "parent_tip": header.parent_tip.hex(),
        "tip": header.tip.hex(),
        "start": str(header.start),
        "end": str(header.end),
        **({"parent_kind": Kind.WINDOW.value} if header.parent_window else {}),
        **({"block": str(header.block), "rows_tip": header.rows_tip.hex()} if header.kind is Kind.WINDOW else {}),
        **({"session": header.session} if header.session else {}),
        "checksum": checksum,
    }
    text = json.dumps({"__metadata__": metadata, **arrays}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def state_bytes(layout: Layout, kind: Kind) -> int:
    """Bytes of state of one position in a segment of this kind."""
    if kind is Kind.ROWS:
        return layout.bytes_per_token
    return layout.bytes_per_window_row if kind is Kind.WINDOW else layout.bytes_per_snapshot


def segment_bytes(header: SegmentHeader, layout: Layout) -> int:
    """Bytes that `encode` will make."""
    blank = _header_bytes(header, header.session, layout, NO_CHECKSUM)
    return len(blank) + data_bytes(layout, header.kind, header.end - header.start)


def encode(
    header: SegmentHeader,
    layout: Layout,
    fill: Callable[[torch.Tensor, int], object],
    tokens: Tokens | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> torch.Tensor:
    """Make a segment: uint8 [bytes]. `fill(place, first)` writes rows from `first` on into `place`, uint8 [rows, bytes
    of one]; of a snapshot all of it, uint8 [bytes]. `tokens` are the ids of `[start, end)`, but for a snapshot.
    """
    blank = _header_bytes(header, header.session, layout, NO_CHECKSUM)
    num_tokens = header.end - header.start
    buffer = torch.empty(len(blank) + data_bytes(layout, header.kind, num_tokens), dtype=torch.uint8)
    whole = buffer.numpy()
    data_start = len(blank)
    digest = xxh3_128(blank)
    if header.kind is not Kind.SNAPSHOT:
        if tokens is None or len(tokens) != num_tokens:
            raise ValueError("a segment of rows needs the ids of exactly its tokens")
        whole[data_start : data_start + 4 * num_tokens] = np.frombuffer(tokens.tobytes(), dtype=np.uint8)
        digest.update(whole[data_start : data_start + 4 * num_tokens].data)
        data_start += 4 * num_tokens
    if header.kind is Kind.SNAPSHOT:
        fill(buffer[data_start:], 0)
        digest.update(whole[data_start:].data)
    else:
        row_bytes = state_bytes(layout, header.kind)
        rows = buffer[data_start:].view(num_tokens, row_bytes)
        step = max(1, block_bytes // max(1, row_bytes))
        for first in range(0, num_tokens, step):
            place = rows[first : first + step]
            fill(place, first)
            digest.update(place.numpy().data)
    sealed = blank.replace(_checksum_entry(NO_CHECKSUM), _checksum_entry(digest.hexdigest()))
    whole[: len(blank)] = np.frombuffer(sealed, dtype=np.uint8)
    return buffer


def parse_header(start_of_file: memoryview | bytes) -> tuple[SegmentHeader, dict[str, object], int, str]:
    """Read a header: (header, safetensors entries, position of the data, checksum). Raises DamagedSegment."""
    if len(start_of_file) < 8:
        raise DamagedSegment("shorter than a header")
    (length,) = struct.unpack("<Q", bytes(start_of_file[:8]))
    if length > MAX_HEADER_BYTES or 8 + length > len(start_of_file):
        raise DamagedSegment("the header is cut off or absurdly long")
    try:
        entries = json.loads(bytes(start_of_file[8 : 8 + length]))
        metadata = entries.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise OtherFormat(f"format {str(metadata['format'])[:40]!r}; this version reads {FORMAT}")
        header = SegmentHeader(
            kind=Kind(metadata["kind"]),
            fingerprint=str(metadata["fingerprint"]),
            space=bytes.fromhex(metadata["space"]),
            address=bytes.fromhex(metadata["address"]),
            parent=bytes.fromhex(metadata["parent"]),
            parent_tip=bytes.fromhex(metadata["parent_tip"]),
            tip=bytes.fromhex(metadata["tip"]),
            start=int(metadata["start"]),
            end=int(metadata["end"]),
            parent_window={"window": True, "rows": False}[metadata.get("parent_kind", "rows")],
            block=int(metadata["block"]) if metadata["kind"] == Kind.WINDOW.value else 0,
            rows_tip=bytes.fromhex(metadata["rows_tip"]) if metadata["kind"] == Kind.WINDOW.value else b"",
            session=str(metadata.get("session", "")),
        )
        checksum = str(metadata["checksum"])
    except DamagedSegment:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedSegment(f"the header cannot be read ({type(error).__name__})") from error
    if not 0 <= header.start <= header.end or len(header.address) != 32 or not CHECKSUM.fullmatch(checksum):
        raise DamagedSegment("the header's positions, address or checksum make no sense")
    if header.kind is Kind.WINDOW and not (header.block > 0 and header.end <= header.start + header.block):
        raise DamagedSegment("the header's block makes no sense")
    if header.kind is Kind.WINDOW and header.start // header.block != (header.end - 1) // header.block:
        raise DamagedSegment("it holds window rows of two blocks")
    if header.kind is Kind.WINDOW and not len(header.rows_tip) == len(header.tip) == len(header.parent_tip) == 32:
        raise DamagedSegment("the header's tips make no sense")
    if (header.kind is Kind.SNAPSHOT) != (header.start == header.end):
        raise DamagedSegment("the header's positions, address or checksum make no sense")
    return header, entries, 8 + length, checksum


@lru_cache(maxsize=16384)
def _checked_header(head: bytes, layout: Layout, fingerprint: str) -> tuple[SegmentHeader, str, bytes]:
    """A header that fits this model, its checksum, and the header's bytes as they were when that was taken.

    Segments are read again at every turn of a session; their headers need to be understood only once.
    """
    header, entries, _, checksum = parse_header(head)
    if header.fingerprint != fingerprint:
        raise DamagedSegment(
            f"it was saved by another model or layout ({header.fingerprint[:12]}…, this is {fingerprint[:12]}…)"
        )
    if header.kind is Kind.WINDOW and not layout.window:
        raise DamagedSegment("it holds window rows, and this model has no sliding window")
    if header.kind is Kind.WINDOW and header.block != layout.window_block:
        raise DamagedSegment(f"it holds window rows of a block of {header.block}, and this layout's are others")
    if entries != _arrays(layout, header.kind, header.end - header.start):
        raise DamagedSegment("its arrays are not those of this layout")
    return header, checksum, head.replace(_checksum_entry(checksum), _checksum_entry(NO_CHECKSUM))


def check_whole(buffer: torch.Tensor, name: str) -> SegmentHeader:
    """Check a segment that is kept as `name` without knowing its model. Raises DamagedSegment."""
    whole = buffer.numpy().data
    header, entries, data_start, checksum = parse_header(whole)
    if name != header.name:
        raise DamagedSegment(f"it is {header.name}, kept under the name of another")
    try:
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]  # type: ignore[index]
        tokens = None if header.kind is Kind.SNAPSHOT else entries["tokens"]["data_offsets"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError, ValueError):
        raise DamagedSegment("its arrays make no sense") from None
    if len(whole) != data_start + max(ends, default=0) or tokens not in (None, [0, 4 * (header.end - header.start)]):
        raise DamagedSegment("it is not as long as its arrays")
    blank = bytes(whole[:data_start]).replace(_checksum_entry(checksum), _checksum_entry(NO_CHECKSUM))
    Seal(checksum, blank, memoryview(b""), whole[data_start:], 1).check()
    return header


def reseal(buffer: torch.Tensor, header: SegmentHeader) -> torch.Tensor:
    """A copy of a segment that has been checked, under another header. Of rows and windows it holds those of
    `[header.start, header.end)`: the others are left out."""
    old, entries, data_start, _ = parse_header(buffer.numpy().data)
    assert header.kind is old.kind and old.start <= header.start <= header.end <= old.end
    data = buffer[data_start:]
    if header.end - header.start < old.end - old.start:
        left = header.end - header.start
        parts, position = [], 0
        for entry in entries.values():  # in the order of their bytes
            first, last = entry["data_offsets"]  # type: ignore[index]
            row_bytes = (last - first) // (old.end - old.start)
            begin = first + row_bytes * (header.start - old.start)
            part = data[begin : begin + row_bytes * left]
            entry["shape"][0] = left  # type: ignore[index]
            entry["data_offsets"] = [position, position + len(part)]  # type: ignore[index]
            parts.append(part)
            position += len(part)
        data = torch.cat(parts)
    blank = _sealed_header(header, entries, NO_CHECKSUM)
    digest = xxh3_128(blank)
    digest.update(data.numpy().data)
    head = _sealed_header(header, entries, digest.hexdigest())
    return torch.cat([torch.from_numpy(np.frombuffer(head, dtype=np.uint8).copy()), data])


def decode(buffer: torch.Tensor, layout: Layout, fingerprint: str, name: str, check: bool = True) -> Segment:
    """Check and view a segment that a tier keeps as `name`. Raises DamagedSegment if anything at all is wrong.

    Without `check` the caller has to go through all of `segment.seal.blocks()`, and may use nothing before its end.
    """
    whole = buffer.numpy().data
    data_start = 8 + int.from_bytes(whole[:8], "little")
    if len(whole) < 8 or data_start > min(len(whole), MAX_HEADER_BYTES):
        raise DamagedSegment("the header is cut off or absurdly long")
    header, checksum, blank = _checked_header(bytes(whole[:data_start]), layout, fingerprint)
    if header.name != name:
        raise DamagedSegment(f"it is {header.name}, kept under the name of another")
    num_tokens = header.end - header.start
    if len(whole) != data_start + data_bytes(layout, header.kind, num_tokens):
        raise DamagedSegment("it is not as long as its arrays")
    state_start = data_start + 4 * num_tokens
    row_bytes = 1 if header.kind is Kind.SNAPSHOT else state_bytes(layout, header.kind)
    seal = Seal(checksum, blank, whole[data_start:state_start], whole[state_start:], row_bytes)
    if check:
        seal.check()
    tokens = np.frombuffer(whole[data_start:state_start], dtype="<u4")
    state = buffer[state_start:]
    if header.kind is Kind.SNAPSHOT:
        return Segment(header, tokens, None, state, seal)
    return Segment(header, tokens, state.view(num_tokens, row_bytes), None, seal)

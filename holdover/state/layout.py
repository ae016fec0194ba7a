"""What a model's state is made of, and how many bytes it takes."""

import hashlib
import json
from dataclasses import dataclass, field
from math import prod

import torch

LAYOUT_VERSION = 1
LAST_HIDDEN = "last_hidden"
TOKEN_ROW_ALIGNMENT = 8
MIN_SLOT_BYTES = 1024  # of models with no rows at all


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of the state: of one token (token state) or of one position (snapshot state)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Field:
    """An array and its place, in bytes, in the row that holds it."""

    spec: ArraySpec
    start: int

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """View this array in `rows` (uint8, [n, row_bytes]) as [n, *shape]; no copy."""
        typed = rows.view(self.spec.dtype)
        first = self.start // self.spec.dtype.itemsize
        part = typed[:, first : first + prod(self.spec.shape)]
        return part.view(len(rows), *self.spec.shape)


def _pack(arrays: tuple[ArraySpec, ...]) -> tuple[tuple[Field, ...], int]:
    """Place arrays one after the other, widest type first, so that each is aligned with no holes."""
    fields, start = [], 0
    for spec in sorted(arrays, key=lambda spec: -spec.dtype.itemsize):
        fields.append(Field(spec, start))
        start += spec.nbytes
    return tuple(fields), start


@dataclass(frozen=True, slots=True)
class WindowPage:
    """A part of a window row that lies in one slot of the device pool: uint8 [nbytes], from byte `start` of the row.

    fields: its arrays, with their places in the page.
    """

    fields: tuple[Field, ...]
    start: int
    nbytes: int


def _aligned(nbytes: int) -> int:
    return -(-nbytes // TOKEN_ROW_ALIGNMENT) * TOKEN_ROW_ALIGNMENT


def _paginate(arrays: tuple[ArraySpec, ...], page_bytes: int) -> tuple[WindowPage, ...]:
    """Put each array into the first page of `page_bytes` bytes that has room for it, widest type first."""
    pages: list[list[ArraySpec]] = []
    for spec in sorted(arrays, key=lambda spec: (-spec.dtype.itemsize, -spec.nbytes)):
        for page in pages:
            if sum(other.nbytes for other in page) + spec.nbytes <= page_bytes:
                page.append(spec)
                break
        else:
            pages.append([spec])
    result, start = [], 0
    for page in pages:
        fields, nbytes = _pack(tuple(page))
        result.append(WindowPage(fields, start, _aligned(nbytes)))
        start += _aligned(nbytes)
    return tuple(result)


@dataclass(frozen=True, eq=False)
class Layout:
    """Every part of a model's state. A state that lacks a part, or has it in another type, is another layout.

    token_arrays: one row per token; snapshot_arrays: one copy per position; window_arrays: one row per token too, but
    only those of the last `window` tokens are read by the next one (a sliding window of W tokens, itself included, has
    a `window` of W - 1). Widest types come first in memory, so that the arrays lie densely and aligned. A window row
    is cut into pages, none larger than `slot_bytes`: the larger of a token row and the largest window array.
    """

    token_arrays: tuple[ArraySpec, ...]
    snapshot_arrays: tuple[ArraySpec, ...]
    window_arrays: tuple[ArraySpec, ...] = ()
    window: int = 0
    token_fields: tuple[Field, ...] = field(init=False)
    snapshot_fields: tuple[Field, ...] = field(init=False)
    window_pages: tuple[WindowPage, ...] = field(init=False)
    bytes_per_token: int = field(init=False)
    bytes_per_snapshot: int = field(init=False)
    bytes_per_window_row: int = field(init=False)
    slot_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        names = [spec.name for spec in (*self.token_arrays, *self.snapshot_arrays, *self.window_arrays)]
        if len(set(names)) != len(names):
            raise ValueError(f"a layout names an array twice: {sorted(names)}")
        if bool(self.window_arrays) != (self.window > 0):
            raise ValueError("a layout has window arrays and a window of at least one row, or neither")
        token_fields, token_bytes = _pack(self.token_arrays)
        snapshot_fields, snapshot_bytes = _pack(self.snapshot_arrays)
        bytes_per_token = _aligned(token_bytes)
        if bytes_per_token:
            slot_bytes = max(bytes_per_token, *(_aligned(spec.nbytes) for spec in self.window_arrays), 0)
        else:  # a page of its own for all of a window row; with no rows at all, a slot still needs a size
            slot_bytes = _aligned(sum(spec.nbytes for spec in self.window_arrays)) or MIN_SLOT_BYTES
        pages = _paginate(self.window_arrays, slot_bytes)
        object.__setattr__(self, "token_fields", token_fields)
        object.__setattr__(self, "snapshot_fields", snapshot_fields)
        object.__setattr__(self, "window_pages", pages)
        object.__setattr__(self, "bytes_per_token", bytes_per_token)
        object.__setattr__(self, "bytes_per_snapshot", snapshot_bytes)
        object.__setattr__(self, "bytes_per_window_row", sum(page.nbytes for page in pages))
        object.__setattr__(self, "slot_bytes", slot_bytes)

    @property
    def resumes_anywhere(self) -> bool:
        """Whether the rows of a prefix are all that is needed to go on from any of its positions.

        False if some part of the state is valid at one position only (besides the last hidden vector), or if rows go
        out of use: then a position can be resumed only where somebody kept what it needs.
        """
        return not self.window and all(spec.name == LAST_HIDDEN for spec in self.snapshot_arrays)

    @property
    def window_block(self) -> int:
        """Window rows are kept and saved from multiples of this on: the largest power of two in half a window."""
        return 1 << max(1, self.window // 2).bit_length() - 1

    def window_first(self, position: int) -> int:
        """The first window row that is kept for whoever goes on from `position`: with all that the next token reads,
        the rest of its block, so that everyone who saves a block begins it at the same row."""
        return max(0, position - self.window) // self.window_block * self.window_block

    def describe(self) -> list[dict[str, object]]:
        """Every array with its place: what another program needs to read the state."""
        places = [
            *(("token", part, part.start) for part in self.token_fields),
            *(("snapshot", part, part.start) for part in self.snapshot_fields),
            *(("window", part, page.start + part.start) for page in self.window_pages for part in page.fields),
        ]
        return [
            {
                "kind": kind,
                "name": part.spec.name,
                "dtype": str(part.spec.dtype).removeprefix("torch."),
                "shape": list(part.spec.shape),
                "start": start,
            }
            for kind, part, start in places
        ]

    def fingerprint(self, weights_digest: str, config: dict[str, object]) -> str:
        """Name of "this model's state": equal only for equal weights, configuration, dtype and layout (hex)."""
        material = {
            "layout_version": LAYOUT_VERSION,
            "weights": weights_digest,
            "config": config,
            "arrays": self.describe(),
            "bytes_per_token": self.bytes_per_token,
            **({"window": self.window} if self.window else {}),
        }
        return hashlib.sha256(json.dumps(material, sort_keys=True, default=str).encode()).hexdigest()

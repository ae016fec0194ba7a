"""What a model's state is made of, and how many bytes it takes."""

import hashlib
import json
from dataclasses import dataclass, field
from math import prod

import torch

LAYOUT_VERSION = 1
LAST_HIDDEN = "last_hidden"
TOKEN_ROW_ALIGNMENT = 8


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


@dataclass(frozen=True, eq=False)
class Layout:
    """Every part of a model's state. A state that lacks a part, or has it in another type, is another layout.

    token_arrays: one row per token; snapshot_arrays: one copy per position. Widest types come first in memory, so
    that the arrays lie densely and aligned. `recurrent` is true if a position can be resumed only from a snapshot.
    """

    token_arrays: tuple[ArraySpec, ...]
    snapshot_arrays: tuple[ArraySpec, ...]
    token_fields: tuple[Field, ...] = field(init=False)
    snapshot_fields: tuple[Field, ...] = field(init=False)
    bytes_per_token: int = field(init=False)
    bytes_per_snapshot: int = field(init=False)

    def __post_init__(self) -> None:
        names = [spec.name for spec in (*self.token_arrays, *self.snapshot_arrays)]
        if len(set(names)) != len(names):
            raise ValueError(f"a layout names an array twice: {sorted(names)}")
        token_fields, token_bytes = _pack(self.token_arrays)
        snapshot_fields, snapshot_bytes = _pack(self.snapshot_arrays)
        object.__setattr__(self, "token_fields", token_fields)
        object.__setattr__(self, "snapshot_fields", snapshot_fields)
        object.__setattr__(self, "bytes_per_token", -(-token_bytes // TOKEN_ROW_ALIGNMENT) * TOKEN_ROW_ALIGNMENT)
        object.__setattr__(self, "bytes_per_snapshot", snapshot_bytes)

    @property
    def recurrent(self) -> bool:
        """True if the state has a part that is valid at one position only, besides the last hidden vector."""
        return any(spec.name != LAST_HIDDEN for spec in self.snapshot_arrays)

    def describe(self) -> list[dict[str, object]]:
        """Every array with its place: what another program needs to read the state."""
        return [
            {
                "kind": kind,
                "name": part.spec.name,
                "dtype": str(part.spec.dtype).removeprefix("torch."),
                "shape": list(part.spec.shape),
                "start": part.start,
            }
            for kind, fields in (("token", self.token_fields), ("snapshot", self.snapshot_fields))
            for part in fields
        ]

    def fingerprint(self, weights_digest: str, config: dict[str, object]) -> str:
        """Name of "this model's state": equal only for equal weights, configuration, dtype and layout (hex)."""
        material = {
            "layout_version": LAYOUT_VERSION,
            "weights": weights_digest,
            "config": config,
            "arrays": self.describe(),
            "bytes_per_token": self.bytes_per_token,
        }
        return hashlib.sha256(json.dumps(material, sort_keys=True, default=str).encode()).hexdigest()

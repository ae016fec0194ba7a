"""What a tier evicts: tokens to compute again when it is smaller than what it should keep, on recorded traffic.

    python -m benchmarks.eviction

Runs the tier's real books over the shipped WEKA sessions, with no model and no device: a turn resumes at the farthest
position whose rows and snapshot are there, computes the rest, and has it saved. Ours (by recompute saved for its bytes,
and age) against least recently used first, both leaf first. Sizes are those of real hybrid models.
"""

import itertools
import json
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from holdover.demo.traffic import demo_sessions
from holdover.state.address import AddressChain, address_key
from holdover.state.policy import snapshots_to_drop
from holdover.state.segment import Kind, Link, segment_name
from holdover.store.ledger import Entry, Ledger
from holdover.store.tier import PutStatus

SHARES = (0.1, 0.2, 0.35, 0.5, 0.75)  # of what all sessions' newest state takes


@dataclass(frozen=True)
class Shape:
    """Bytes of one token's rows, and of a snapshot."""

    name: str
    row_bytes: int
    snapshot_bytes: int


SHAPES = (
    Shape("Qwen3.5-0.8B, float32", 12_288, 19 << 20),  # 6 layers of 2 x 2 x 256 keys and values
    Shape("Kimi-Linear-48B, bfloat16", 7 * 576 * 2, 20 * 32 * 128 * 128 * 4),  # 7 MLA layers, 20 of KDA
    Shape("full attention, bfloat16", 36 * 2 * 8 * 128 * 2, 8_192),  # Qwen3-8B; the last hidden vector alone
)


class LeastRecentlyUsed(Ledger):
    """The books with nothing but age."""

    def _rank(self, name: str, entry: Entry) -> float:
        return entry.last_used


@dataclass
class Turn:
    """What a turn's prompt is cut into: (start, end, name of its rows, name of the snapshot at its end). session: its
    number."""

    session: int
    pieces: list[tuple[int, int, str, str]]


def turns_of(sessions: int, turns: int, shrink: float) -> list[Turn]:
    """All agents at once: a turn of each, then the next of each. Where prompts part, a piece ends."""
    found = demo_sessions("weka", sessions, turns, 8192, shrink)
    key = address_key("benchmark", "")
    cuts: dict[bytes, int] = {}  # address of a position where a piece ends, by any session
    result = []
    for row in itertools.zip_longest(*(session.turns for session in found)):
        for session, turn in enumerate(row):
            if turn is None or turn.token_ids is None:
                continue
            tokens = np.asarray(turn.token_ids, dtype="<u4")
            chain = AddressChain(key, tokens)
            unit = max(1, int(64 / shrink))
            ends = [end for end in range(unit, len(tokens), unit) if chain.address(end) in cuts]
            ends.append(len(tokens))
            cuts.update((chain.address(end), end) for end in ends)
            result.append(
                Turn(
                    session,
                    [
                        (
                            start, end, segment_name(Kind.ROWS, chain.address(start + 1)),
                            segment_name(Kind.SNAPSHOT, chain.address(end)),
                        )
                        for start, end in itertools.pairwise([0, *ends])
                    ],
                )
            )  # fmt: skip
    return result


def run(turns: list[Turn], shape: Shape, budget: int, kind: type[Ledger], shrink: float) -> tuple[int, int]:
    """Tokens that are computed, and most bytes kept."""
    ledger = kind(budget, lambda name: None)
    computed = most = 0
    kept: dict[int, dict[int, str]] = {}  # snapshots of each session's chain, by position
    for turn in turns:
        resume = known = 0
        for _, end, rows, snapshot in turn.pieces:
            if not ledger.has(rows):
                break
            known = end
            if ledger.has(snapshot):
                resume = end
        computed += turn.pieces[-1][1] - resume
        parent = None
        for start, end, rows, snapshot in turn.pieces:
            if end > known:
                put(ledger, rows, int((end - start) * shrink) * shape.row_bytes, parent)
            if end == turn.pieces[-1][1]:
                put(ledger, snapshot, shape.snapshot_bytes, rows)
                own = kept.setdefault(turn.session, {})
                own[end] = snapshot
                for position in snapshots_to_drop(sorted(own)):
                    ledger.remove(own.pop(position))
            parent = rows
        ledger.touch([turn.pieces[-1][3], *(rows for _, _, rows, _ in turn.pieces[::-1])])
        most = max(most, ledger.used_bytes)
    return computed, most


def put(ledger: Ledger, name: str, nbytes: int, parent: str | None) -> None:
    if parent is not None and not ledger.lease(parent):
        return
    if ledger.reserve(name, nbytes, Link(name, parent, "")).status is PutStatus.KEPT:
        ledger.complete(name)
    if parent is not None:
        ledger.release(parent)


def main(
    sessions: Annotated[int, typer.Option(help="Use this many sessions.")] = 96,
    turns: Annotated[int, typer.Option(help="And so many turns of each.")] = 40,
    shrink: Annotated[float, typer.Option(help="Divide tokens by this; bytes are counted as if they weren't.")] = 16.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Print how many tokens are computed under each order, for each size of the tier."""
    found = turns_of(sessions, turns, shrink)
    sent = sum(turn.pieces[-1][1] for turn in found)
    rows = []
    for shape in track(SHAPES, console=Console(stderr=True), description="shapes"):
        least, most = run(found, shape, 1 << 62, Ledger, shrink)
        for share in SHARES:
            ours, _ = run(found, shape, int(share * most), Ledger, shrink)
            by_age, _ = run(found, shape, int(share * most), LeastRecentlyUsed, shrink)
            rows.append(
                {"shape": shape.name, "share": share, "sent": sent, "least": least, "ours": ours, "lru": by_age}
            )
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(
        title=f"{len(found):,} turns, {sent:,} prompt tokens; tokens computed, 1.00 = with a tier of any size"
    )
    for column in ("sizes of", "tier's share of all", "ours", "least recently used", "ratio"):
        table.add_column(column)
    for row in rows:
        ours, lru = row["ours"] / row["least"], row["lru"] / row["least"]
        table.add_row(row["shape"], f"{row['share']:.2f}", f"{ours:.3f}", f"{lru:.3f}", f"{ours / lru:.3f}")
    Console(width=110).print(table)
    print("printed by: python -m benchmarks.eviction")


if __name__ == "__main__":
    typer.run(main)

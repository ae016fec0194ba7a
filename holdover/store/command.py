"""`holdover store ...`: what the commands do and print."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from holdover.config import BUCKETS, NO_LIMIT, PEER, TierConfig, format_bytes, parse_bytes, parse_tier
from holdover.errors import HoldoverError, TierError
from holdover.store.catalog import (
    Catalog,
    Entry,
    Tell,
    find_history,
    histories,
    read_catalog,
    read_headers,
    summarize,
    to_collect,
    verify,
)
from holdover.store.encryption import Cipher
from holdover.store.keys import read_key
from holdover.store.objects import ObjectTier, bucket_tier, disk_tier
from holdover.store.opening import open_place
from holdover.store.place import Place
from holdover.store.removal import remove
from holdover.store.transfer import export_session, import_session
from holdover.store.usage import FolderUsage

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
NAME_DIGITS = 12


def parse_place(text: str) -> TierConfig:
    """A folder, or what `--tier` says of one, or a bucket's URL; the budget may be left out. Raises HoldoverError."""
    kind = text.partition(":")[0]
    if kind in BUCKETS:
        return parse_tier(text)
    if kind == PEER:
        raise HoldoverError("a peer's tiers are its own to look at; name a folder or a bucket.")
    if kind == "memory":
        raise HoldoverError("a memory tier is gone when its server ends; name a folder or a bucket.")
    folder = text.removeprefix("disk:")
    parent, colon, size = folder.rpartition(":")
    if colon and not Path(folder).exists():
        return TierConfig("disk", parent, parse_bytes(size, "the folder's size"))
    return TierConfig("disk", folder, NO_LIMIT)


def parse_age(text: str) -> float:
    """Seconds of an age such as 12h or 30d. Raises HoldoverError."""
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS or not number.replace(".", "", 1).isdigit():
        raise HoldoverError(f"--older-than {text!r} is no age; write it like 12h, 30d or 8w.")
    return float(number) * UNITS[unit]


def age(seconds: float) -> str:
    """How long ago, for people."""
    for unit, size in reversed(UNITS.items()):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return "0s"


def printable(text: str) -> str:
    """A client's text for a terminal: nothing in it is a command."""
    return "".join(each if each.isprintable() else "?" for each in text)


class Session:
    """One run of a command: where it looks, and how it speaks. `as_json`: only JSON on standard output."""

    def __init__(self, place: str, key_file: Path | None, as_json: bool) -> None:
        self.config = parse_place(place)
        self.key = read_key(key_file, os.environ.get("HOLDOVER_ENCRYPTION_KEY"))
        self.as_json = as_json
        self.console = Console(stderr=as_json, markup=False)
        self.errors = Console(stderr=True, markup=False)

    def place(self) -> Place:
        return open_place(self.config, self.key)

    def tier(self) -> ObjectTier:
        """The place as a tier that can be saved into, within the budget that was given or that its engines keep."""
        cipher = None if self.key is None else Cipher(self.key)
        budget = self.config.budget_bytes
        if self.config.kind != "disk":
            return bucket_tier(self.config.place, budget, self.config.kind, cipher)
        folder = Path(self.config.place)
        if budget == NO_LIMIT and (folder / "usage").exists():
            usage = FolderUsage(folder)
            budget = usage.budget() or NO_LIMIT
            usage.close()
        return disk_tier(folder, budget, "disk", cipher)

    @contextmanager
    def progress(self, doing: str, total: int | None, in_bytes: bool = False) -> Iterator[Tell]:
        """A bar on standard error where somebody looks."""
        columns = DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn()
        with Progress(
            TextColumn(doing), BarColumn(), columns, TimeElapsedColumn(), console=self.errors, transient=True,
            disable=not self.errors.is_terminal,
        ) as bar:  # fmt: skip
            task = bar.add_task(doing, total=total)
            yield lambda count: bar.advance(task, count)

    def catalog(self, place: Place) -> Catalog:
        with self.progress("listing", None) as tell:
            return read_catalog(place, tell)

    def say(self, text: str) -> None:
        if not self.as_json:
            self.console.print(printable(text), highlight=False, soft_wrap=True)

    def show(self, body: dict[str, Any]) -> None:
        if self.as_json:
            sys.stdout.write(json.dumps(body, indent=2) + "\n")


def _when(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _describe(entry: Entry) -> dict[str, Any]:
    header = entry.header
    return {
        "name": entry.name,
        "kind": entry.kind,
        "bytes": entry.item.nbytes,
        "modified": _when(entry.item.modified),
        **({} if header is None else {
            "start": header.start, "end": header.end, "session": header.session or None,
            "model": header.fingerprint, "tenant": header.space.hex(), "parent": header.parent_name,
        }),
        **({"problem": entry.problem} if entry.problem else {}),
    }  # fmt: skip


def list_segments(run: Session, every_segment: bool, limit: int) -> int:
    """`store ls`: histories, or every segment."""
    place = run.place()
    catalog = run.catalog(place)
    now = time.time()
    if every_segment:
        entries = sorted(catalog.entries.values(), key=lambda entry: -entry.item.modified)
        shown = entries if run.as_json or not limit else entries[:limit]
        with run.progress("reading", len(shown)) as tell:
            read_headers(place, shown, tell)
        table = Table("segment", "kind", "tokens", "bytes", "age", "session", "model", box=None)
        for entry in shown:
            header = entry.header
            span = entry.problem if header is None else f"{header.start:,} to {header.end:,}"
            table.add_row(
                entry.name[:NAME_DIGITS], entry.kind, span, format_bytes(entry.item.nbytes),
                age(now - entry.item.modified), printable(header.session) if header else "",
                printable(header.fingerprint[:8]) if header else "",
            )  # fmt: skip
        run.show({"place": place.shown, "segments": [_describe(entry) for entry in shown]})
        total = len(entries)
    else:
        with run.progress("reading", len(catalog.leaves())) as tell:
            found = histories(place, catalog, tell)
        chosen = found if run.as_json or not limit else found[:limit]
        table = Table("history", "tokens", "segments", "bytes", "age", "session", "model", box=None)
        for history in chosen:
            table.add_row(
                history.leaf.name[:NAME_DIGITS], f"{history.header.end:,}", f"{len(history.path)}",
                format_bytes(history.nbytes), age(now - history.leaf.item.modified), printable(history.header.session),
                printable(history.header.fingerprint[:8]),
            )  # fmt: skip
        body = [
            {**_describe(history.leaf), "tokens": history.header.end, "rows_bytes": history.nbytes,
             "segments": [entry.name for entry in history.path]}
            for history in chosen
        ]  # fmt: skip
        run.show({"place": place.shown, "histories": body})
        total = len(found)
    if not run.as_json:
        if total:
            run.console.print(table)
        what = "segments" if every_segment else "histories"
        rest = f"; the {limit} most recent are shown, --limit 0 shows all" if limit and total > limit else ""
        run.say(f"{total:,} {what} in {place.shown}{rest}")
    return 0


def show_statistics(run: Session) -> int:
    """`store stats`."""
    place = run.place()
    catalog = run.catalog(place)
    with run.progress("reading", len(catalog.entries)) as tell:
        summary = summarize(place, catalog, tell)
    budget = None
    if place.folder is not None and (place.folder / "usage").exists():
        usage = FolderUsage(place.folder)
        budget = usage.budget()
        usage.close()
    total = sum(summary.nbytes.values())
    body = {**vars(summary), "sharing": summary.sharing, "bytes": total, "budget_bytes": budget}
    body |= {"oldest": _when(summary.oldest), "newest": _when(summary.newest)}
    run.show({"place": place.shown, **body})
    if run.as_json:
        return 0
    table = Table("kind", "segments", "bytes", box=None)
    for kind, count in sorted(summary.segments.items()):
        table.add_row(kind, f"{count:,}", format_bytes(summary.nbytes[kind]))
    run.console.print(table)
    limit = f" of {format_bytes(budget)}" if budget else ""
    run.say(
        f"{format_bytes(total)}{limit} in {place.shown}: {summary.tokens:,} tokens of {summary.histories:,} histories, "
        f"{summary.sessions:,} named sessions, {len(summary.models):,} models, {summary.tenants:,} tenants"
    )
    run.say(f"each token is shared by {summary.sharing:.2f} histories: one copy of what they have in common")
    if summary.orphans or summary.unreadable or summary.foreign:
        run.say(
            f"of no use: {summary.orphans:,} orphans, {summary.unreadable:,} unreadable, {summary.foreign:,} of other "
            "formats; holdover store verify says which, holdover store gc removes orphans"
        )
    return 0


def verify_segments(run: Session, repair: bool, salt: str) -> int:
    """`store verify`. 1 if something is broken and was not repaired."""
    place = run.place()
    listed = run.catalog(place)
    with run.progress("checking", len(listed.entries)) as tell:
        verdict = verify(place, tell, salt)
    useless = [*verdict.broken, *verdict.orphans]
    freed = remove(place, [entry.item for entry in useless]) if repair and useless else 0
    run.show(
        {
            "place": place.shown,
            "segments": verdict.segments,
            "bytes": verdict.nbytes,
            "addresses_checked": verdict.addresses,
            "broken": [_describe(entry) for entry in verdict.broken],
            "orphans": [_describe(entry) for entry in verdict.orphans],
            "other_formats": [item.path for item in verdict.other],
            "repaired": repair,
            "freed_bytes": freed,
        }
    )
    for entry in verdict.broken:
        run.say(f"broken: {entry.name}: {entry.problem}")
    for entry in verdict.orphans:
        run.say(f"orphan: {entry.name}: what it goes on from is not there")
    if verdict.other:
        run.say(f"{len(verdict.other):,} objects of other formats are left alone")
    checked = f"{verdict.segments:,} segments ({format_bytes(verdict.nbytes)}) checked in {place.shown}"
    if not useless:
        run.say(f"{checked}: all whole")
        return 0
    what = f"{len(verdict.broken):,} broken, {len(verdict.orphans):,} orphans"
    if repair:
        run.say(
            f"{checked}: {what}; removed, {format_bytes(freed)} freed. What they held is computed again when needed."
        )
        return 0
    run.say(f"{checked}: {what}. Nothing wrong is ever served from them; --repair removes them.")
    return 1


def collect(run: Session, older_than: str | None, budget: str | None, keep_model: str | None, dry_run: bool) -> int:
    """`store gc`."""
    place = run.place()
    seconds = None if older_than is None else parse_age(older_than)
    budget_bytes = None if budget is None else parse_bytes(budget, "--budget")
    catalog = run.catalog(place)
    if keep_model is not None:
        with run.progress("reading", len(catalog.entries)) as tell:
            read_headers(place, catalog.entries.values(), tell)
    doomed = to_collect(catalog, older_than=seconds, budget_bytes=budget_bytes, keep_model=keep_model)
    nbytes = sum(entry.item.nbytes for entry in doomed)
    if not dry_run:
        with run.progress("removing", len(doomed)) as tell:
            nbytes = remove(place, [entry.item for entry in doomed], tell)
    run.show(
        {"place": place.shown, "dry_run": dry_run, "bytes": nbytes, "segments": [_describe(entry) for entry in doomed]}
    )
    done = "would go" if dry_run else "removed"
    run.say(f"{len(doomed):,} segments ({format_bytes(nbytes)}) {done} in {place.shown}")
    return 0


def export(run: Session, session: str, file: Path) -> int:
    """`store export`."""
    place = run.place()
    segments = find_history(place, run.catalog(place), session)
    with run.progress("exporting", sum(entry.item.nbytes for entry in segments), in_bytes=True) as tell:
        moved = export_session(place, segments, file, tell)
    run.show({"place": place.shown, "file": str(file), **asdict(moved)})
    run.say(
        f"{moved.tokens:,} tokens of {session} ({moved.kept:,} segments, {format_bytes(moved.nbytes)}) are in {file}; "
        "bring them in elsewhere with: holdover store import PLACE FILE"
    )
    return 0


def bring_in(run: Session, file: Path, salt: str) -> int:
    """`store import`. 1 if there was no room for all."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise TierError(f"{file} can't be read ({error.strerror or error}).") from None
    tier = run.tier()
    try:
        with run.progress("importing", size, in_bytes=True) as tell:
            moved = import_session(tier, file, tell, salt)
    finally:
        tier.close()
    run.show({"place": tier.place.shown, "file": str(file), **asdict(moved)})
    run.say(
        f"{moved.kept:,} segments ({format_bytes(moved.nbytes)}) written to {tier.place.shown}, {moved.shared:,} were "
        f"there already: {moved.tokens:,} tokens"
    )
    if moved.refused:
        run.say(f"{moved.refused:,} segments had no room within {format_bytes(tier.budget_bytes)}")
        return 1
    return 0

"""Tiers on object stores, the local disk first: one object per segment, written whole or not at all."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from obstore.exceptions import BaseError

from holdover.config import format_bytes
from holdover.errors import TierError
from holdover.state.segment import Kind, Link, SegmentHeader
from holdover.store.encryption import Cipher
from holdover.store.ledger import PARENT_DIGITS, Ledger, parent_digits
from holdover.store.place import Place, bucket_error, bucket_place, folder_error, folder_place
from holdover.store.tier import ALONE, PutResult, PutStatus
from holdover.store.usage import FolderUsage

log = logging.getLogger(__name__)
CLAIMS = "claims"  # notes of what is being computed; not counted, a few hundred bytes each while they last
CLAIM_LEFT_SECONDS = 3600.0  # who left an older one is gone, as far as others can know
ROOT = "0" * PARENT_DIGITS  # where a segment that begins at position 0 would name its parent
KINDS = frozenset(kind.value for kind in Kind)
OPENING_SECONDS = 60.0  # a save waits no longer for the list of a place to end
TRY_AGAIN_SECONDS = 1.0  # after a list that failed
HEADS_AT_ONCE = 16
RELIST_SECONDS = 10.0  # a full place that others write to is not listed more often


def object_path(name: str, parent: str | None) -> str:
    """Where a segment lies. Segments are spread over 256 folders, and say whom they go on from: so a list of all paths
    is the whole tree. Names are digests that Holdover makes, never user input."""
    address, kind = name.split(".")
    before = ROOT if parent is None else parent_digits(parent) or parent
    return f"segments/{name[:2]}/{address}.{before}.{kind}"


def parse_path(path: str) -> tuple[str, str | None] | None:
    """Name of the segment that lies at a path, and what stands for its parent; None if it is no segment's path."""
    parts = path.rsplit("/", 1)[-1].split(".")
    if len(parts) != 3 or len(parts[0]) != 64 or len(parts[1]) != PARENT_DIGITS or parts[2] not in KINDS:
        return None
    return f"{parts[0]}.{parts[2]}", None if parts[1] == ROOT else parts[1]


def _identify(path: str) -> tuple[str, str | None]:
    """As `parse_path`. What is no segment of this version counts too, under its path, and goes as it is not used."""
    return parse_path(path) or (path, None)


def disk_tier(
    folder: Path, budget_bytes: int, name: str = "disk", cipher: Cipher | None = None, wait: bool = True
) -> "ObjectTier":
    """The tier in one local folder. wait: until its books are complete. Raises TierError if the folder cannot be made,
    written or read."""
    place = folder_place(folder, f"{name} tier", cipher)
    try:
        place.probe()
        usage = FolderUsage(folder)
        usage.remember(budget_bytes)
        return ObjectTier(place, budget_bytes, name, usage, wait=wait)
    except (OSError, BaseError) as error:
        raise folder_error(folder, f"{name} tier", error) from None


def bucket_tier(
    url: str, budget_bytes: int, name: str, cipher: Cipher | None = None, wait: bool = True
) -> "ObjectTier":
    """The tier in a bucket, below the prefix in its URL. Raises TierError if it cannot be written or read."""
    place = bucket_place(url, f"{name} tier", cipher)
    try:
        place.probe()
        return ObjectTier(place, budget_bytes, name, wait=wait)
    except (OSError, BaseError) as error:
        raise bucket_error(url, f"{name} tier", error) from None


class ObjectTier:
    """Keeps segments in one place. usage: where several processes count the place's bytes together.

    The books are made from a list of the place, on a thread of its own: what is asked for meanwhile is looked up in the
    place itself (`head`, `adopt`), and what is saved waits. Raises TierError, with `wait`, if it cannot be listed.
    """

    immediate = False
    shared = True
    claims = True

    def __init__(
        self, place: Place, budget_bytes: int, name: str, usage: FolderUsage | None = None, wait: bool = True
    ) -> None:
        self.name = name
        self.place = place
        self.budget_bytes = budget_bytes
        self._usage = usage
        self._ledger = Ledger(budget_bytes, self._remove, usage)
        self._opened = threading.Event()
        self._failure: TierError | None = None
        self._next_list = 0.0
        if wait:
            self._open()
            if self._failure is not None:
                raise self._failure
        else:
            threading.Thread(target=self._open, name=f"holdover-open-{name}", daemon=True).start()

    # Opening

    def _open(self) -> None:
        try:
            self._read_list()
            if count := self.num_segments:
                log.info(
                    "%s tier: %s segments (%s) are there", self.name, f"{count:,}", format_bytes(self.used_bytes())
                )
        except TierError as error:
            self._failure = error
            log.warning("%s; the tier is read without a list, and nothing is saved there", error)
        except Exception as error:
            self._failure = TierError(f"listing the {self.name} tier {self.place.shown} failed: {error}")
            log.exception("listing the %s tier failed", self.name)
        finally:
            self._opened.set()

    def _read_list(self) -> None:
        began = time.time()
        alone = self._usage is not None and self._usage.enter()
        try:
            total, new = 0, []
            if alone:
                self.place.remove_staged()
            for item in sorted(self.place.list(), key=lambda item: item.modified):
                name, parent = _identify(item.path)
                if not self._ledger.knows(name):
                    self._ledger.adopt(name, item.nbytes, Link("", parent, ""), over_budget=True)
                    new.append(name)
                elif self._path(name) != item.path:  # one name lies in two places: nobody could tell which
                    self.place.delete(item.path)
                    continue
                total += item.nbytes
            self._ledger.put_behind(new)
            if alone and self._usage is not None:
                self._usage.counted(total)
            self._remove_claims(began - (0.0 if alone else CLAIM_LEFT_SECONDS))  # alone: whoever left one is gone
        finally:
            if alone and self._usage is not None:
                self._usage.admit_others()
        self._remove_orphans()
        self._ledger.shrink()

    def _remove_claims(self, before: float) -> None:
        """Those that were left before a moment. That they can't be removed is no reason not to open."""
        with suppress(TierError):
            for item in self.place.list(CLAIMS):
                if item.modified < before:
                    self.place.delete(item.path)

    def _remove_orphans(self) -> None:
        """Remove what goes on from rows that are gone. Others may be writing: what seems to have no parent in one list
        must have none in a second."""
        if not (orphans := self._ledger.orphans()):
            return
        self._enter_new()
        for name in set(orphans).intersection(self._ledger.orphans()):
            self._ledger.remove(name)

    def _enter_new(self) -> bool:
        """Enter what others have written. Whether there was anything."""
        found = False
        for item in self.place.list():
            name, parent = _identify(item.path)
            if not self._ledger.knows(name):
                found |= self._ledger.adopt(name, item.nbytes, Link("", parent, ""))
        return found

    def wait_opened(self, seconds: float = OPENING_SECONDS) -> None:
        """Until the books are complete. Raises TierError if they aren't by then, or can't be made."""
        if not self._opened.wait(seconds):
            raise TierError(f"the {self.name} tier {self.place.shown} is still being listed")
        if self._failure is not None:
            failure = self._failure
            if time.monotonic() >= self._next_list:  # try again, for whoever comes next
                self._next_list = time.monotonic() + TRY_AGAIN_SECONDS
                self._failure = None
                self._opened.clear()
                threading.Thread(target=self._open, name=f"holdover-open-{self.name}", daemon=True).start()
            raise failure

    @property
    def opened(self) -> bool:
        """Whether the books are complete."""
        return self._opened.is_set() and self._failure is None

    # The calls of a tier

    def has(self, name: str) -> bool:
        return self._ledger.has(name)

    @contextmanager
    def get(self, name: str) -> Iterator[torch.Tensor | None]:
        if not self._ledger.lease(name):
            yield None
            return
        try:
            yield self.place.read(self._path(name))
        finally:
            self._ledger.release(name)

    def put(self, name: str, nbytes: int, make: Callable[[], torch.Tensor], link: Link = ALONE) -> PutResult:
        self.wait_opened()
        parent = link.parent
        if parent is None:
            return self._put(name, nbytes, make, link)
        if not self._ledger.lease(parent, link.parent_tip):
            return PutResult(PutStatus.ORPHAN)
        try:
            result = self._put(name, nbytes, make, link)
            if result.status is PutStatus.KEPT and not self._ledger.has(parent):  # it was removed meanwhile
                self._ledger.remove(name)
                return PutResult(PutStatus.ORPHAN, result.evicted)
            return result
        finally:
            self._ledger.release(parent)

    def _put(self, name: str, nbytes: int, make: Callable[[], torch.Tensor], link: Link) -> PutResult:
        result = self._ledger.reserve(name, nbytes + self.place.overhead(nbytes), link)
        if result.status is PutStatus.REFUSED and self._usage is not None and time.monotonic() >= self._next_list:
            self._next_list = time.monotonic() + RELIST_SECONDS
            if self._enter_new():  # what others have written can go for it too
                again = self._ledger.reserve(name, nbytes + self.place.overhead(nbytes), link)
                result = PutResult(again.status, result.evicted + again.evicted)
        if result.status is not PutStatus.KEPT:
            return result
        try:
            created = self.place.create(object_path(name, link.parent), make)
        except TierError as error:
            if self.place.folder is None:  # it may have been written after all
                with suppress(TierError):
                    self.place.delete(object_path(name, link.parent))
            self._ledger.abandon(name)
            error.evicted = result.evicted
            raise
        except BaseException:
            self._ledger.abandon(name)
            raise
        if not created:  # another engine was faster; what exactly it keeps, the caller has to look at
            self._ledger.abandon(name)
            return PutResult(PutStatus.ALREADY_THERE, result.evicted)
        self._ledger.complete(name)
        return result

    def delete(self, name: str, parent: str | None = None) -> None:
        if not self._ledger.remove(name) and not self._ledger.knows(name):
            freed = self.place.delete(object_path(name, parent))
            if freed and self._usage is not None:
                self._usage.give(freed)

    @staticmethod
    def path_of(header: SegmentHeader) -> str:
        """Where a segment with this header lies."""
        return object_path(header.name, header.parent_name)

    def _path(self, name: str) -> str:
        return name if "/" in name else object_path(name, self._ledger.parent(name))

    def _remove(self, name: str) -> int | None:
        return self.place.delete(self._path(name))

    def scan(self) -> Iterator[str]:
        return self._ledger.names()

    def head(self, name: str, nbytes: int, parent: str | None) -> bytes | None:
        return self.place.read_start(object_path(name, parent), nbytes)

    def heads(self, names: Iterable[str], nbytes: int) -> dict[str, bytes]:
        if self.place.folder is not None or not self.opened:
            return {}
        known = [name for name in names if self._ledger.has(name)]
        if len(known) < 2:
            return {}
        with ThreadPoolExecutor(min(HEADS_AT_ONCE, len(known)), thread_name_prefix="holdover-heads") as pool:
            found = pool.map(lambda name: self.place.read_start(self._path(name), nbytes), known)
            return {name: head for name, head in zip(known, found, strict=True) if head is not None}

    def adopt(self, name: str, nbytes: int, link: Link) -> bool:
        return self._ledger.adopt(name, nbytes + self.place.overhead(nbytes), link)

    def claim(self, name: str, content: bytes) -> bytes | None:
        return self.place.create_note(f"{CLAIMS}/{name}", content)

    def claimed(self, name: str) -> bytes | None:
        return self.place.read_note(f"{CLAIMS}/{name}")

    def unclaim(self, name: str) -> None:
        self.place.delete(f"{CLAIMS}/{name}")

    @property
    def num_segments(self) -> int:
        """How many segments the books have."""
        return sum(1 for _ in self._ledger.names())

    def touch(self, names: list[str]) -> None:
        self._ledger.touch(names)

    def used_bytes(self) -> int:
        return self._ledger.used_bytes

    def close(self) -> None:
        """Leave the place to others; nothing may be asked of this tier any more."""
        if self._usage is not None:
            self._usage.close()

"""Tiers on object stores, the local disk first: one object per segment, written whole or not at all."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import obstore
import torch
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import LocalStore, ObjectStore, from_url

from holdover.errors import TierError
from holdover.state.segment import Kind, Link
from holdover.store.ledger import PARENT_DIGITS, Ledger
from holdover.store.tier import ALONE, PutResult, PutStatus

log = logging.getLogger(__name__)
PROBE = "probe"
ROOT = "0" * PARENT_DIGITS  # where a segment that begins at position 0 would name its parent
KINDS = frozenset(kind.value for kind in Kind)
REQUEST_TIMEOUT, CONNECT_TIMEOUT, RETRY_TIMEOUT = timedelta(seconds=60), timedelta(seconds=5), timedelta(seconds=20)
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
MAX_RETRIES = 2  # then the tier is left alone for a while, and serving goes on without it


def object_path(name: str, parent: str | None) -> str:
    """Where a segment lies. Segments are spread over 256 folders, and say whom they go on from: so a list of all paths
    is the whole tree. Names are digests that Holdover makes, never user input."""
    address, kind = name.split(".")
    return f"segments/{name[:2]}/{address}.{ROOT if parent is None else parent[:PARENT_DIGITS]}.{kind}"


def parse_path(path: str) -> tuple[str, str | None] | None:
    """Name of the segment that lies at a path, and the beginning of its parent's; None if it is no segment's path."""
    parts = path.rsplit("/", 1)[-1].split(".")
    if len(parts) != 3 or len(parts[0]) != 64 or len(parts[1]) != PARENT_DIGITS or parts[2] not in KINDS:
        return None
    return f"{parts[0]}.{parts[2]}", None if parts[1] == ROOT else parts[1]


def _identify(path: str) -> tuple[str, str | None]:
    """As `parse_path`. What is no segment of this version counts too, under its path, and goes as it is not used."""
    return parse_path(path) or (path, None)


def disk_tier(folder: Path, budget_bytes: int, name: str = "disk") -> "ObjectTier":
    """The tier in one local folder. Raises TierError if the folder cannot be made, written or read."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return ObjectTier(LocalStore(str(folder.resolve()), automatic_cleanup=False), str(folder), budget_bytes, name)
    except (OSError, BaseError) as error:
        raise TierError(
            f"the disk tier {folder} can't be written ({_reason(error)}). Give another folder with "
            "--disk-tier DIR:SIZE, or make this one writable."
        ) from None


def bucket_tier(url: str, budget_bytes: int, name: str) -> "ObjectTier":
    """The tier in a bucket of S3, GCS or Azure, below the prefix in its URL. Credentials come from where the service's
    own tools take them: environment, web identity, instance role. Raises TierError if it cannot be written or read."""
    unencrypted = any(os.environ.get(each, "").startswith("http://") for each in ENDPOINT_VARIABLES)
    try:
        store = from_url(
            url,
            client_options={
                "timeout": REQUEST_TIMEOUT,
                "connect_timeout": CONNECT_TIMEOUT,
                "allow_http": unencrypted,  # only where the user names such a server
            },
            retry_config={"max_retries": MAX_RETRIES, "retry_timeout": RETRY_TIMEOUT},
        )
        return ObjectTier(store, url, budget_bytes, name)
    except (OSError, ValueError, BaseError) as error:
        raise TierError(
            f"the {name} tier {url} can't be used ({_reason(error)}). Check the bucket's name and region, and the "
            "credentials in the environment."
        ) from None


class ObjectTier:
    """Keeps segments in one object store. `place` names it to the user. Raises OSError or obstore's BaseError if the
    store cannot be written or listed."""

    immediate = False
    shared = True

    def __init__(self, store: ObjectStore, place: str, budget_bytes: int, name: str) -> None:
        self.name = name
        self.place = place
        self.budget_bytes = budget_bytes
        self._store = store
        self._ledger = Ledger(budget_bytes, self._remove)
        obstore.put(self._store, PROBE, b"holdover")
        obstore.delete(self._store, PROBE)
        found = [item for page in obstore.list(self._store, prefix="segments") for item in page]
        found.sort(key=lambda item: item["last_modified"])
        for item in reversed(found):  # newest first, as far as the budget reaches
            name, parent = _identify(item["path"])
            link = Link("", parent, "")
            if self._ledger.knows(name) or not self._ledger.adopt(name, item["size"], link):
                obstore.delete(self._store, item["path"])
        self._ledger.touch([_identify(item["path"])[0] for item in found])
        for name in self._ledger.orphans():
            self._ledger.remove(name)

    def has(self, name: str) -> bool:
        return self._ledger.has(name)

    @contextmanager
    def get(self, name: str) -> Iterator[torch.Tensor | None]:
        if not self._ledger.lease(name):
            yield None
            return
        try:
            yield self._read(name)
        finally:
            self._ledger.release(name)

    def _read(self, name: str) -> torch.Tensor | None:
        try:
            content = obstore.get(self._store, self._path(name)).bytes()
        except (NotFoundError, FileNotFoundError):
            return None
        except (OSError, BaseError) as error:
            raise TierError(f"reading from the {self.name} tier {self.place} failed: {_reason(error)}") from error
        array = np.frombuffer(memoryview(content), dtype=np.uint8)
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def put(self, name: str, nbytes: int, make: Callable[[], torch.Tensor], link: Link = ALONE) -> PutResult:
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
        result = self._ledger.reserve(name, nbytes, link)
        if result.status is not PutStatus.KEPT:
            return result
        try:
            obstore.put(
                self._store, object_path(name, link.parent), make().numpy().data, mode="create", use_multipart=False
            )
        except AlreadyExistsError:  # another engine was faster; what exactly it keeps, the caller has to look at
            self._ledger.abandon(name)
            return PutResult(PutStatus.ALREADY_THERE, result.evicted)
        except (OSError, BaseError) as error:
            with suppress(TierError):
                self._remove(name)  # should it have been written after all
            self._ledger.abandon(name)
            message = f"writing to the {self.name} tier {self.place} failed: {_reason(error)}"
            raise TierError(message, evicted=result.evicted) from error
        except BaseException:
            self._ledger.abandon(name)
            raise
        self._ledger.complete(name)
        return result

    def delete(self, name: str, parent: str | None = None) -> None:
        if not self._ledger.remove(name) and not self._ledger.knows(name):
            self._remove_path(object_path(name, parent))

    def _path(self, name: str) -> str:
        return name if "/" in name else object_path(name, self._ledger.parent(name))

    def _remove(self, name: str) -> None:
        self._remove_path(self._path(name))

    def _remove_path(self, path: str) -> None:
        try:
            obstore.delete(self._store, path)
        except (NotFoundError, FileNotFoundError):
            pass
        except (OSError, BaseError) as error:
            raise TierError(f"removing from the {self.name} tier {self.place} failed: {_reason(error)}") from error

    def scan(self) -> Iterator[str]:
        return self._ledger.names()

    def head(self, name: str, nbytes: int, parent: str | None) -> bytes | None:
        try:
            return bytes(obstore.get(self._store, object_path(name, parent), options={"range": (0, nbytes)}).bytes())
        except (NotFoundError, FileNotFoundError):
            return None
        except (OSError, BaseError) as error:
            raise TierError(f"reading from the {self.name} tier {self.place} failed: {_reason(error)}") from error

    def adopt(self, name: str, nbytes: int, link: Link) -> bool:
        return self._ledger.adopt(name, nbytes, link)

    @property
    def num_segments(self) -> int:
        """How many segments the books have."""
        return sum(1 for _ in self._ledger.names())

    def touch(self, names: list[str]) -> None:
        self._ledger.touch(names)

    def used_bytes(self) -> int:
        return self._ledger.used_bytes


def _reason(error: Exception) -> str:
    """The first line that says why: obstore appends a trace of its own."""
    text = str(error).strip() or type(error).__name__
    for line in text.splitlines():
        if "os error" in line.lower() or "denied" in line.lower():
            return line.strip().strip('",')
    return text.splitlines()[0][:300]

"""How many bytes a tier's place holds: the number that its budget is compared with."""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdover.errors import TierError

COUNT_BYTES = 8


class Usage(Protocol):
    """Bytes in use. Safe from any thread."""

    shared: bool  # whether others take and give too

    def take(self, nbytes: int, budget_bytes: int) -> int:
        """Take so many bytes if the budget allows it, and return 0; else take none, and return how many lack."""

    def give(self, nbytes: int) -> None:
        """So many bytes are free again."""

    def total(self) -> int:
        """Bytes in use by all."""


class OwnUsage:
    """Of a place that only this process counts."""

    shared = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0

    def take(self, nbytes: int, budget_bytes: int) -> int:
        with self._lock:
            lacking = max(0, self._total + nbytes - budget_bytes)
            self._total += 0 if lacking else nbytes
            return lacking

    def give(self, nbytes: int) -> None:
        with self._lock:
            self._total -= nbytes

    def total(self) -> int:
        with self._lock:
            return self._total


class FolderUsage:
    """Of a folder that several processes write to: one number in a file, changed under a lock.

    Each process takes its bytes before it writes, and gives them back after it has removed a file. One that is killed
    in between leaves the number too high, never too low; the next process that has the folder to itself counts anew.
    """

    shared = True

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._lock = threading.Lock()
        self._folder = folder
        self._files: list[int] = []
        flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC  # to write it is opened anew: so its disk can be remounted
        for name in ("users.lock", "usage"):
            self._files.append(os.open(folder / name, flags, 0o600))
        self._users, self._count = self._files

    def enter(self) -> bool:
        """Become one of the folder's users, after one that is counting has ended. Whether this process is the only
        one: then it has to count, and nobody else enters before it has said what it `counted`."""
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.admit_others()
            return False
        return True

    def admit_others(self) -> None:
        """Let others enter (after this process did, and does not count any more)."""
        fcntl.flock(self._users, fcntl.LOCK_SH)

    @contextmanager
    def held(self) -> Iterator["Total"]:
        """The number, while nobody else can change it. Raises TierError."""
        with self._lock:
            try:
                fcntl.flock(self._count, fcntl.LOCK_EX)
                try:
                    total = Total(int.from_bytes(os.pread(self._count, COUNT_BYTES, 0), "little"))
                    before = total.nbytes
                    yield total
                    if total.nbytes != before:
                        self._write(max(0, total.nbytes), 0)
                finally:
                    fcntl.flock(self._count, fcntl.LOCK_UN)
            except OSError as error:
                raise TierError(f"counting the bytes in {self._folder} failed: {error.strerror or error}") from error

    def counted(self, nbytes: int) -> None:
        """The folder holds so many bytes."""
        with self.held() as total:
            total.nbytes = nbytes

    def take(self, nbytes: int, budget_bytes: int) -> int:
        with self.held() as total:
            lacking = max(0, total.nbytes + nbytes - budget_bytes)
            total.nbytes += 0 if lacking else nbytes
            return lacking

    def give(self, nbytes: int) -> None:
        with self.held() as total:
            total.nbytes -= nbytes

    def total(self) -> int:
        if not self._files:
            return 0
        return int.from_bytes(os.pread(self._count, COUNT_BYTES, 0), "little")

    def budget(self) -> int | None:
        """The budget that the engine which used the folder last keeps to, if one did."""
        return int.from_bytes(os.pread(self._count, COUNT_BYTES, COUNT_BYTES), "little") or None

    def remember(self, budget_bytes: int) -> None:
        """Let tools know the budget. Raises OSError."""
        self._write(budget_bytes, COUNT_BYTES)

    def _write(self, number: int, position: int) -> None:
        file = os.open(self._folder / "usage", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(file, number.to_bytes(COUNT_BYTES, "little"), position)
        finally:
            os.close(file)

    def close(self) -> None:
        """Leave the folder."""
        while self._files:
            os.close(self._files.pop())

    def __del__(self) -> None:
        self.close()


@dataclass(slots=True)
class Total:
    """Bytes in use."""

    nbytes: int

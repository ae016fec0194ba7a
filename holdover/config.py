"""Settings, each declared once: the command line and the environment (HOLDOVER_SERVE_...) are made from these."""

import re
from pathlib import Path

import msgspec

from holdover.errors import HoldoverError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def parse_bytes(text: str, setting: str) -> int:
    """Bytes of a size such as 2GiB, 500MB or 1048576. Raises HoldoverError, which names the setting."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].upper() not in UNITS:
        raise HoldoverError(f"{setting} {text!r} is no size; write it like 2GiB, 500MB or 1048576.")
    size = int(float(found[1]) * UNITS[found[2].upper()])
    if size <= 0:
        raise HoldoverError(f"{setting} {text!r} must be more than nothing.")
    return size


def format_bytes(size: float) -> str:
    """A size for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError


def parse_disk_tier(text: str) -> tuple[Path, int]:
    """Folder and budget of DIR:SIZE. Raises HoldoverError."""
    folder, colon, size = text.rpartition(":")
    if not colon or not folder:
        raise HoldoverError(f"--disk-tier {text!r} must be DIR:SIZE, for example /var/lib/holdover:50GiB.")
    return Path(folder), parse_bytes(size, "--disk-tier size")


class DiskTierConfig(msgspec.Struct, frozen=True):
    """A local-disk tier."""

    folder: str
    budget_bytes: int


class EngineConfig(msgspec.Struct, frozen=True):
    """Everything that an engine process is started with."""

    model: str
    to_engine: str
    from_engine: str
    dtype: str = "auto"
    device: str = "cpu"
    device_bytes: int = 2 << 30
    memory_bytes: int | None = None
    disk: DiskTierConfig | None = None
    max_running: int | None = None
    max_batch_tokens: int = 1024
    snapshot_spacing: int = 2048
    context_length: int | None = None
    threads: int | None = None
    audit: bool = False

"""Settings, each declared once: the command line and the environment (HOLDOVER_SERVE_...) are made from these."""

import os
import re
from enum import StrEnum

import msgspec

from holdover.errors import HoldoverError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip

BUCKETS = ("s3", "gs", "az")
PEER = "peer"
DEFAULT_MEMORY_TIER = "8GiB"
NO_LIMIT = 1 << 62
FIND_SECONDS = 1.0


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


class SaveMode(StrEnum):
    """When a turn is saved. eager: at its end. lazy: when its room on the device is wanted, or after half a minute.
    auto: at its end as long as the tiers keep up, else as soon as they do."""

    EAGER = "eager"
    LAZY = "lazy"
    AUTO = "auto"


class TierConfig(msgspec.Struct, frozen=True):
    """A tier. kind: memory, disk, s3, gs, az or peer. place: the folder, the URL of a bucket and a prefix in it, or the
    peer's HOST:PORT."""

    kind: str
    place: str
    budget_bytes: int

    def __str__(self) -> str:
        budget = "no limit" if self.budget_bytes == NO_LIMIT else format_bytes(self.budget_bytes)
        if self.kind == PEER:
            return f"peer {self.place}"
        if self.kind in BUCKETS:
            return f"{self.place} {budget}"
        return " ".join(part for part in (self.kind, self.place, budget) if part)


def parse_tier(text: str) -> TierConfig:
    """What `--tier` says: memory:SIZE, disk:DIR:SIZE, a bucket's URL with or without :SIZE, or peer://HOST:PORT.

    Raises HoldoverError.
    """
    kind, colon, rest = text.partition(":")
    if not colon or kind not in ("memory", "disk", PEER, *BUCKETS):
        raise HoldoverError(
            f"--tier {text!r} must be memory:SIZE, disk:DIR:SIZE, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
            "az://CONTAINER/PREFIX (with :SIZE at the end to limit it) or peer://HOST:PORT, for example "
            "disk:/var/lib/holdover:200GiB."
        )
    if kind == "memory":
        return TierConfig(kind, "", parse_bytes(rest, "--tier memory: size"))
    if kind == "disk":
        return parse_disk_tier(rest, "--tier disk:DIR:SIZE")
    if kind == PEER:
        found = re.fullmatch(r"//([^/]+:\d{1,5})/?", rest)
        if found is None or int(found[1].rpartition(":")[2]) > 65535:
            raise HoldoverError(f"--tier {text!r} must be peer://HOST:PORT, what the other's --peer-listen says.")
        return TierConfig(kind, found[1], NO_LIMIT)
    if not rest.startswith("//") or not rest.strip("/").split("/")[0]:
        raise HoldoverError(f"--tier {text!r} names no bucket; write {kind}://BUCKET/PREFIX.")
    url, _, size = text.rpartition(":")
    if "/" in size:
        return TierConfig(kind, text, NO_LIMIT)
    return TierConfig(kind, url, parse_bytes(size, f"--tier {kind}: size"))


def parse_disk_tier(text: str, setting: str = "--disk-tier") -> TierConfig:
    """A folder and its budget, DIR:SIZE. Raises HoldoverError."""
    folder, colon, size = text.rpartition(":")
    if not colon or not folder:
        raise HoldoverError(f"{setting} {text!r} must be DIR:SIZE, for example /var/lib/holdover:50GiB.")
    return TierConfig("disk", folder, parse_bytes(size, f"{setting} size"))


def choose_tiers(tiers: list[str], memory: str | None, disk: str | None) -> tuple[TierConfig, ...]:
    """The tiers, nearest first, from `--tier`, or from the short forms for one of memory and one on disk.

    Raises HoldoverError if they contradict each other.
    """
    if tiers and (memory is not None or disk is not None):
        raise HoldoverError("--tier says all tiers, nearest first; leave out --memory-tier and --disk-tier.")
    if tiers:
        chosen = [] if tiers == ["none"] else [parse_tier(text) for text in tiers]
    else:
        chosen = [] if memory in ("none", "0") else [parse_tier(f"memory:{memory or DEFAULT_MEMORY_TIER}")]
        chosen += [parse_disk_tier(disk)] if disk else []
    seen = set()
    for tier in chosen:
        place = (tier.kind, tier.place.rstrip("/") if tier.kind in (*BUCKETS, PEER) else os.path.abspath(tier.place))
        if place in seen:
            raise HoldoverError(
                f"--tier: {tier.place or tier.kind} is given twice; each tier needs a place of its own."
            )
        seen.add(place)
    return tuple(chosen)


def tier_names(tiers: tuple[TierConfig, ...]) -> list[str]:
    """A name for each tier, for reports and metrics: its kind, with a number if there are several of it."""
    names: list[str] = []
    for tier in tiers:
        count = sum(name.split("-")[0] == tier.kind for name in names)
        names.append(f"{tier.kind}-{count + 1}" if count else tier.kind)
    return names


class EngineConfig(msgspec.Struct, frozen=True):
    """Everything that an engine process is started with."""

    model: str
    to_engine: str
    from_engine: str
    dtype: str = "auto"
    device: str = "cpu"
    device_bytes: int = 2 << 30
    tiers: tuple[TierConfig, ...] = ()
    max_running: int | None = None
    max_batch_tokens: int = 1024
    snapshot_spacing: int = 2048
    context_length: int | None = None
    threads: int | None = None
    audit: bool = False
    find_seconds: float = FIND_SECONDS
    save: SaveMode = SaveMode.AUTO
    encryption_key: str | None = None  # 64 hexadecimal digits; never shown
    peer_listen: str | None = None  # HOST:PORT where peers may read what the tiers keep
    peer_secret: str | None = None  # 64 hexadecimal digits; never shown

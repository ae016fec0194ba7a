"""Tiers and places from their settings."""

from pathlib import Path

from holdover.config import PEER, TierConfig
from holdover.errors import HoldoverError
from holdover.store.encryption import Cipher
from holdover.store.keys import NO_SECRET
from holdover.store.memory import MemoryTier
from holdover.store.objects import bucket_tier, disk_tier
from holdover.store.peer import PeerTier
from holdover.store.place import Place, bucket_place, folder_place
from holdover.store.tier import Tier


def open_tier(config: TierConfig, name: str, key: str | None = None, secret: str | None = None) -> Tier:
    """Open a tier under the name that reports call it by. key: for encryption at rest; memory is not encrypted.
    secret: that peers share.

    The books of a folder or bucket are made while the tier is used. Raises TierError if its place can't be used.
    """
    cipher = None if key is None else Cipher(key)
    if config.kind == "memory":
        return MemoryTier(config.budget_bytes)
    if config.kind == PEER:
        if secret is None:
            raise HoldoverError(f"--tier {config}: {NO_SECRET}")
        return PeerTier(config.place, secret, name)
    if config.kind == "disk":
        return disk_tier(Path(config.place), config.budget_bytes, name, cipher, wait=False)
    return bucket_tier(config.place, config.budget_bytes, name, cipher, wait=False)


def open_place(config: TierConfig, key: str | None = None) -> Place:
    """The folder or bucket of a tier as it is, for tools: nothing is made. Raises TierError."""
    cipher = None if key is None else Cipher(key)
    if config.kind == "disk":
        place = folder_place(Path(config.place), "disk tier", cipher, make=False)
    else:
        place = bucket_place(config.place, f"{config.kind} tier", cipher)
    place.check_key()
    return place

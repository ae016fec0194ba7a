"""Tiers from their settings."""

from pathlib import Path

from holdover.config import TierConfig
from holdover.store.memory import MemoryTier
from holdover.store.objects import bucket_tier, disk_tier
from holdover.store.tier import Tier


def open_tier(config: TierConfig, name: str) -> Tier:
    """Open a tier under the name that reports call it by. Raises TierError if its place can't be used."""
    if config.kind == "memory":
        return MemoryTier(config.budget_bytes)
    if config.kind == "disk":
        return disk_tier(Path(config.place), config.budget_bytes, name)
    return bucket_tier(config.place, config.budget_bytes, name)

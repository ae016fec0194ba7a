"""What the engine counts, each thing where it happens."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class TierCounters:
    """Of one tier, since the start. saved: from the device; promoted: copied from a farther tier on loading; found:
    of those that another engine saved, or this one before it was restarted.

    bytes_new_state: saved state that the tier did not keep before, without headers.
    """

    segments_saved: int = 0
    bytes_saved: int = 0
    bytes_new_state: int = 0
    segments_found: int = 0
    segments_promoted: int = 0
    bytes_promoted: int = 0
    bytes_loaded: int = 0
    tokens_loaded: int = 0
    segments_evicted: int = 0
    segments_lost: int = 0
    segments_unreachable: int = 0


@dataclass(slots=True)
class Counters:
    """Of one engine, since the start. prompt_tokens_computed counts tokens as they are fed, again ones included."""

    requests: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_reused_device: int = 0
    generated_tokens: int = 0
    loads_failed: int = 0
    snapshots_kept: int = 0
    snapshots_skipped: int = 0
    tiers: dict[str, TierCounters] = field(default_factory=dict)

"""The demo's traffic: shipped recordings, shrunk by one stated factor."""

from collections.abc import Sequence
from importlib.resources import as_file, files

import numpy as np

from holdover.errors import HoldoverError
from holdover.state.address import as_tokens
from holdover.state.node import common_length
from holdover.traffic.importers import BlockTokens, load_trace
from holdover.traffic.trace import Session

SHRINK, QUICK_SHRINK = 12.8, 32.0  # tokens of the WEKA sessions, prompts and outputs, are divided by this
FILES = {"weka": "weka-sessions.jsonl.xz", "tau-bench": "tau-bench-airline.jsonl.xz"}


def demo_sessions(traffic: str, agents: int, turns: int, vocab_size: int, shrink: float) -> list[Session]:
    """The first `turns` turns of `agents` shipped sessions. Raises HoldoverError for unknown traffic."""
    if traffic not in FILES:
        raise HoldoverError(f"--traffic {traffic!r} is not shipped; use {' or '.join(FILES)}.")
    with as_file(files("holdover.demo").joinpath("data", FILES[traffic])) as path:
        sessions = load_trace(path, BlockTokens(vocab_size, shrink))
    chosen = [session for session in sessions if len(session.turns) >= min(turns, 4)][:agents]
    return [session.part(0, turns) for session in chosen]


def distinct_prefix_positions(prompts: Sequence[Sequence[int]]) -> int:
    """How many prompt tokens a token-exact cache without limit computes: the distinct prefixes of all prompts.

    Sorted, each prompt adds the positions that it does not share with the one before.
    """
    arrays = sorted((as_tokens(prompt) for prompt in prompts), key=lambda tokens: tokens.astype(">u4").tobytes())
    distinct, before = 0, np.empty(0, dtype="<u4")
    for tokens in arrays:
        distinct += len(tokens) - common_length(before, tokens)
        before = tokens
    return distinct

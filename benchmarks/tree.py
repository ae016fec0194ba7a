"""The prefix tree at size: matching a prompt of 100,000 tokens and inserting a turn, in a tree of 100,000 nodes.

    python -m benchmarks.tree

Prints medians, and for matching what part of the time a plain comparison of the same bytes would take. Eviction is
measured in a full pool: each turn must evict as much as it adds.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from holdover.state.address import Tokens, as_tokens
from holdover.state.layout import LAST_HIDDEN, ArraySpec, Layout
from holdover.state.node import Node
from holdover.state.pool import DevicePool
from holdover.state.tree import PrefixTree

NODES, TURN, LONG = 100_000, 200, 100_000  # nodes in all; tokens of a turn; tokens of a long prompt
SHORT_TURNS = 90
LAYOUT = Layout(
    (ArraySpec("rows", (1,), torch.int64),),
    (ArraySpec("recurrent", (1,), torch.int64), ArraySpec(LAST_HIDDEN, (2,), torch.float32)),
)
ROUNDS = 40


def milliseconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def add_turn(tree: PrefixTree, root: Node, prompt: Tokens, known: int) -> Node:
    """What the engine does with a turn, but for the model: match, take room, publish, keep a snapshot, thin."""
    match = tree.match(root, prompt)
    assert match.position == known, (match.position, known)
    return insert(tree, tree.node_at(match), prompt)


def insert(tree: PrefixTree, node: Node, prompt: Tokens) -> Node:
    tree.lease(node)
    count = len(prompt) - node.end
    assert tree.make_room(count + tree.pool.slots_per_snapshot)
    slots = tree.pool.allocate_rows(count)
    assert slots is not None
    end, _ = tree.extend(node, prompt[node.end :], slots)
    tree.release(node)
    tree.lease(end)
    kept = tree.pool.allocate(tree.pool.slots_per_snapshot)
    assert kept is not None
    tree.keep_snapshot(end, kept)
    tree.thin(end)
    tree.release(end)
    return end


def main() -> None:
    rng = np.random.default_rng(0)
    long_nodes = LONG // TURN
    sessions = (NODES - 20 * long_nodes) // SHORT_TURNS
    slots = (NODES + 20 * ROUNDS) * (TURN + 4)
    pool = DevicePool(LAYOUT, slots * 8, 1, torch.device("cpu"))
    tree = PrefixTree(LAYOUT, pool)
    root = tree.root(bytes(32))
    longs = [as_tokens(rng.integers(0, 100_000, LONG)) for _ in range(20)]
    shorts = [as_tokens(rng.integers(0, 100_000, (SHORT_TURNS + 1) * TURN)) for _ in range(sessions)]
    for tokens in (*longs, *shorts):
        for end in range(TURN, len(tokens) - TURN + 1 if len(tokens) < LONG else LONG + 1, TURN):
            add_turn(tree, root, tokens[:end], end - TURN)
    print(f"{tree.num_nodes:,} nodes, {pool.num_used:,} slots in use")
    matches, compares, inserts, whole = [], [], [], []
    for i in range(ROUNDS):
        tokens = longs[i % len(longs)]
        packed, copy = tokens.tobytes(), tokens.copy().tobytes()
        matches.append(milliseconds(lambda tokens=tokens: tree.match(root, tokens)))
        compares.append(milliseconds(lambda packed=packed, copy=copy: packed == copy))
        short = shorts[i]
        node = tree.match(root, short[: SHORT_TURNS * TURN]).node
        inserts.append(milliseconds(lambda node=node, short=short: insert(tree, node, short)))
        more = as_tokens(np.concatenate([tokens, rng.integers(0, 100_000, TURN)]))
        whole.append(milliseconds(lambda more=more: add_turn(tree, root, more, LONG)))
    match = statistics.median(matches)
    print(f"match {LONG:,} tokens along {long_nodes} nodes: {match:.3f} ms (target: under 2)")
    print(f"  a plain comparison of the same bytes: {statistics.median(compares) / match:.1%} of that")
    insertion = statistics.median(inserts)
    print(f"insert a turn of {TURN} tokens after {SHORT_TURNS} others: {insertion:.3f} ms (target: under 0.2)")
    print(f"a whole turn after {long_nodes} others, match included: {statistics.median(whole):.3f} ms")
    count = pool.num_free
    held = pool.allocate(count)  # full from here on
    full = []
    for _ in range(ROUNDS):
        short = as_tokens(rng.integers(0, 100_000, TURN))
        full.append(milliseconds(lambda short=short: insert(tree, root, short)))
    assert held is not None
    print(f"insert a turn into a full pool, evicting for it: {statistics.median(full):.3f} ms")
    print("printed by: python -m benchmarks.tree")


if __name__ == "__main__":
    main()

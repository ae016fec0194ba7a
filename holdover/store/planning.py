"""What to save: pure functions of the tree's path."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from holdover.state.address import AddressChain, Tokens
from holdover.state.node import Node, Saved, path_to
from holdover.state.pool import Slots
from holdover.state.segment import Kind, SegmentHeader
from holdover.state.tree import PrefixTree
from holdover.store.queues import SaveJob


@dataclass(frozen=True, slots=True)
class SaveContext:
    """Whose state it is. tokens: from position 0, at least as far as the path goes. session: the client's own name
    for its session, if it gave one."""

    fingerprint: str
    space: bytes
    chain: AddressChain
    tokens: Tokens
    session: str | None


SavePlanner = Callable[[PrefixTree, Node, SaveContext], list[SaveJob]]


def plan_delta(tree: PrefixTree, node: Node, context: SaveContext) -> list[SaveJob]:
    """Save what the path to `node` has and no tier keeps or is about to keep: each thing once, each turn its delta.

    Neighbouring unsaved nodes become one segment. Registers what it plans with the tree.
    """
    path = path_to(node)
    jobs: list[SaveJob] = []
    run: list[Node] = []
    for each in path:
        if each.rows is None and each.slots is not None:
            run.append(each)
            continue
        jobs += _rows_job(tree, run, context)
        run = []
    jobs += _rows_job(tree, run, context)
    for each in path:
        if each.snapshot is None and each.snapshot_slots is not None and each.rows is not None:
            jobs.append(snapshot_job(tree, each, context, context.chain.address(each.end), each.rows.address))
    return jobs


def _rows_job(tree: PrefixTree, run: list[Node], context: SaveContext) -> list[SaveJob]:
    if not run:
        return []
    before = run[0].parent
    parent = context.space if before is None or before.rows is None else before.rows.address
    slots = [each.slots for each in run if each.slots is not None]
    return [rows_job(tree, run, context, context.chain.address(run[-1].end), parent, slots)]


def rows_job(
    tree: PrefixTree, run: list[Node], context: SaveContext, address: bytes, parent: bytes, slots: list[Slots]
) -> SaveJob:
    """A job that saves the rows of a run of nodes as one segment."""
    start, end = run[0].start, run[-1].end
    saved = Saved(Kind.ROWS, address, start, end)
    tree.register(saved, run)
    header = SegmentHeader(Kind.ROWS, context.fingerprint, context.space, address, parent, start, end)
    return SaveJob(saved, header, context.tokens[:end], np.concatenate(slots), run[-1])


def snapshot_job(tree: PrefixTree, node: Node, context: SaveContext, address: bytes, parent: bytes) -> SaveJob:
    """A job that saves the snapshot at a node's end."""
    assert node.snapshot_slots is not None
    saved = Saved(Kind.SNAPSHOT, address, node.end, node.end)
    tree.register(saved, [node])
    header = SegmentHeader(Kind.SNAPSHOT, context.fingerprint, context.space, address, parent, node.end, node.end)
    return SaveJob(saved, header, context.tokens[: node.end], node.snapshot_slots, node)

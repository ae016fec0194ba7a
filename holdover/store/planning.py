"""What to save: pure functions of the tree's path."""

from collections.abc import Callable

import numpy as np

from holdover.state.node import Node, Saved, live_windows, path_to
from holdover.state.pool import Slots
from holdover.state.segment import Kind, SegmentHeader
from holdover.state.tree import PrefixTree
from holdover.store.jobs import PrefixContext, SaveJob

MOST_SESSION_CHARACTERS = 128  # of its name: a header stays under 4 KiB
SavePlanner = Callable[[PrefixTree, Node, PrefixContext], list[SaveJob]]


def plan_delta(tree: PrefixTree, node: Node, context: PrefixContext) -> list[SaveJob]:
    """Save what the path to `node` has and no tier keeps or is about to keep: each thing once, each turn its delta.

    Neighbouring unsaved nodes become one segment, but where a model goes on from snapshots only, each snapshot lies at
    the end of one: there others look for it. Registers what it plans with the tree.
    """
    cut = not tree.layout.resumes_anywhere
    path = path_to(node)
    jobs: list[SaveJob] = []
    run: list[Node] = []
    for each in path:
        if each.rows is None and each.slots is not None:
            run.append(each)
            if not (cut and (each.snapshot_slots is not None or each.snapshot is not None)):
                continue
        jobs += _rows_job(tree, run, context)
        run = []
    jobs += _rows_job(tree, run, context)
    for each in path:
        if each.snapshot is None and each.snapshot_slots is not None and each.rows is not None:
            jobs.append(snapshot_job(tree, each, context, context.chain.address(each.end), each.rows))
    return jobs + _window_jobs(tree, node, context)


def _window_jobs(tree: PrefixTree, node: Node, context: PrefixContext) -> list[SaveJob]:
    """Jobs that save the window rows on the path to `node` that are still of use and that no segment holds."""
    jobs: list[SaveJob] = []
    block = tree.layout.window_block
    live_nodes = list(live_windows(node, tree.layout)) if tree.layout.window else []
    for each, live in reversed(live_nodes):
        if each.window is None or each.rows is None:
            continue
        for first, last in _uncovered(max(live, each.window_start), each.end, each.windows_saved):
            for start in range(first - first % block, last, block):
                jobs += _window_job(tree, each, context, max(first, start), min(last, start + block))
    return jobs


def _window_job(tree: PrefixTree, node: Node, context: PrefixContext, first: int, last: int) -> list[SaveJob]:
    """A job that saves the window rows `[first, last)`, of one block, of a node.

    What lies of a block in one rows segment is a chain of window segments, each named by its first token. So who looks
    for it knows the one name under which it can lie, and nothing lies twice.
    """
    assert node.rows is not None and node.window is not None
    parent = node.rows
    if first > max(node.rows.start, first - first % tree.layout.window_block):
        before = node.window_before(first)
        if before is None or before.rows_tip != node.rows.tip:  # nobody could find it: the chain is not there
            return []
        parent = before
    slots = node.window[first - node.window_start : last - node.window_start]
    return [window_job(tree, node, context, context.chain.address(first + 1), first, last, slots, parent)]


def _uncovered(first: int, last: int, segments: list[Saved]) -> list[tuple[int, int]]:
    """The parts of `[first, last)` that none of `segments`, the last first, holds."""
    parts = []
    for saved in segments:
        if last > max(first, saved.end):
            parts.append((max(first, saved.end), last))
        last = min(last, saved.start)
    if last > first:
        parts.append((first, last))
    return parts


def _rows_job(tree: PrefixTree, run: list[Node], context: PrefixContext) -> list[SaveJob]:
    if not run:
        return []
    before = run[0].parent
    parent = None if before is None else before.rows
    slots = [each.slots for each in run if each.slots is not None]
    return [rows_job(tree, run, context, context.chain.address(run[0].start + 1), parent, slots)]


def rows_job(
    tree: PrefixTree, run: list[Node], context: PrefixContext, address: bytes, parent: Saved | None, slots: list[Slots]
) -> SaveJob:
    """A job that saves the rows of a run of nodes as one segment."""
    start, end = run[0].start, run[-1].end
    saved = Saved(Kind.ROWS, address, start, end, context.chain.address(end))
    return _job(tree, saved, run, context, parent, np.concatenate(slots))


def snapshot_job(tree: PrefixTree, node: Node, context: PrefixContext, address: bytes, parent: Saved | None) -> SaveJob:
    """A job that saves the snapshot at a node's end."""
    assert node.snapshot_slots is not None
    saved = Saved(Kind.SNAPSHOT, address, node.end, node.end, address)
    return _job(tree, saved, [node], context, parent, node.snapshot_slots)


def window_job(
    tree: PrefixTree,
    node: Node,
    context: PrefixContext,
    address: bytes,
    first: int,
    last: int,
    slots: Slots,
    parent: Saved | None,
) -> SaveJob:
    """A job that saves the window rows `[first, last)` of a node; slots: [last - first, slots_per_window_row]."""
    assert node.rows is not None
    saved = Saved(Kind.WINDOW, address, first, last, context.chain.address(last), node.rows.tip)
    return _job(tree, saved, [node], context, parent, slots)


def _job(
    tree: PrefixTree, saved: Saved, nodes: list[Node], context: PrefixContext, parent: Saved | None, slots: Slots
) -> SaveJob:
    tree.saved.register(saved, nodes)
    header = SegmentHeader(
        kind=saved.kind,
        fingerprint=context.fingerprint,
        space=context.space,
        address=saved.address,
        parent=context.space if parent is None else parent.address,
        parent_tip=context.space if parent is None else parent.tip,
        tip=saved.tip,
        start=saved.start,
        end=saved.end,
        parent_window=parent is not None and parent.kind is Kind.WINDOW,
        block=tree.layout.window_block if saved.kind is Kind.WINDOW else 0,
        rows_tip=saved.rows_tip,
        session=(context.session or "")[:MOST_SESSION_CHARACTERS],
    )
    return SaveJob(context, saved, header, slots, nodes[-1])

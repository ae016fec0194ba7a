"""Every invariant of the prefix tree and its pool, checked. Tests call it after every operation."""

import numpy as np

from holdover.state.pool import Slots
from holdover.state.tree import PrefixTree


def check_integrity(tree: PrefixTree, other_slots: Slots | None = None) -> None:
    """Raise AssertionError if any invariant is broken. `other_slots` are those that sequences own themselves."""
    held = [tree.pool.free_slots()] if other_slots is None else [tree.pool.free_slots(), other_slots]
    listed, leaves, superseded, unleased_tokens, unleased_window_rows, leased_snapshots = tree.books()
    most_rows = tree.layout.window + tree.layout.window_block - 1
    num_nodes = -tree.num_roots
    for node in tree.nodes():
        num_nodes += 1
        for first, child in node.children.items():
            assert child.parent is node and child.start == node.end, "a child does not follow its parent"
            assert len(child.tokens) > 0 and int(child.tokens[0]) == first, "a child under the wrong token"
            assert child.leases <= node.leases, "a child leased more than its parent"
            assert child.last_used <= node.last_used, "a parent less recent than its child"
        assert not node.snapshot_leases or node.snapshot_slots is not None, "a leased snapshot is gone"
        assert node.packed == node.tokens.tobytes(), "tokens and their bytes differ"
        assert (node in listed) == (node.snapshot_slots is not None), "snapshot not listed"
        assert not node.evictable or node in leaves, "rows that could be evicted are not queued"
        assert not node.superseded or node.snapshot_leases or node in superseded, (
            "a snapshot that could be evicted is not queued"
        )
        generated = on_device = 0
        for child in node.children.values():
            generated += child.generated
            on_device += child.slots is not None
        assert node.generated_children == generated, "generated children miscounted"
        assert node.device_children == on_device, "device children miscounted"
        if node.slots is not None:
            if node.leases == 0:
                unleased_tokens -= len(node.tokens)
            assert len(node.slots) == len(node.tokens), "rows and tokens differ in number"
            if tree.pool.slots_per_token:
                held.append(node.slots)
        if node.snapshot_slots is not None:
            leased_snapshots -= node.snapshot_leases > 0
            assert len(node.snapshot_slots) == tree.pool.slots_per_snapshot
            held.append(node.snapshot_slots)
        if node.window is not None:
            unleased_window_rows -= len(node.window) if node.leases == 0 else 0
            assert node.slots is not None, "window rows of tokens whose rows are not on the device"
            assert 0 < len(node.window) <= min(most_rows, len(node.tokens)), "more window rows than can be of use"
            held.append(node.window.reshape(-1))
        for saved in (node.rows, node.snapshot, *node.windows_saved):
            assert saved is None or node in tree.saved.holders(saved), "a saved segment does not know its holder"
        if node.rows is not None:
            assert node.rows.start <= node.start and node.end <= node.rows.end, "rows outside their segment"
        if node.snapshot is not None:
            assert node.snapshot.end == node.end, "a snapshot of another position"
        if node.windows_saved:
            for saved in node.windows_saved:
                assert saved.start < node.end and node.start < saved.end, "window rows of another node"
            ends = [saved.end for saved in node.windows_saved]
            assert ends == sorted(ends, reverse=True), "saved windows out of order"
    assert num_nodes == tree.num_nodes, "nodes miscounted"
    assert unleased_tokens == 0, "tokens without a lease miscounted"
    assert unleased_window_rows == 0, "window rows without a lease miscounted"
    assert leased_snapshots == 0, "leased snapshots miscounted"
    slots = np.concatenate(held)
    uses = np.bincount(slots, minlength=tree.pool.num_slots)
    assert len(uses) == len(slots) == tree.pool.num_slots, "a slot is lost or used twice"
    assert (uses == 1).all(), "a slot is lost or used twice"

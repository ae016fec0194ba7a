"""How saving was done before: each session saves its own copy, the whole of it, at every turn. For comparison only.

An engine process whose only difference from the product's is what a turn saves. Lookups, loads, the tier and its
budget are the same, so a session finds its newest whole copy, as long as the tier still has it.
"""

import os
import sys

from holdover.engine.process import main
from holdover.state.address import AddressChain, address_key
from holdover.state.node import Node, path_to
from holdover.state.tree import PrefixTree
from holdover.store.jobs import PrefixContext, SaveJob
from holdover.store.planning import rows_job, snapshot_job


def plan_whole(tree: PrefixTree, node: Node, context: PrefixContext) -> list[SaveJob]:
    """Save everything from position 0 to `node`, under an address of this session's own."""
    path = [each for each in path_to(node) if len(each.tokens)]
    slots = [each.slots for each in path if each.slots is not None]
    if not path or len(slots) < len(path):
        return []
    owner = context.session or "anonymous"
    own = AddressChain(address_key(context.fingerprint, f"{context.space.hex()} {owner}"), context.tokens)
    address = own.address(node.end)
    if node.rows is not None and node.rows.address == address:
        return []
    jobs = [rows_job(tree, path, context, address, None, slots)]
    if node.snapshot_slots is not None:
        # Without a parent: a tier keeps what others go on from, and old snapshots would keep old whole copies there.
        jobs.append(snapshot_job(tree, node, context, address, None))
    return jobs


if __name__ == "__main__":
    code = main(plan_whole)
    sys.stderr.flush()
    os._exit(code)

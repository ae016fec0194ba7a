"""Loads: small ones of near state run at once, others on the loader's thread; both put back the same bytes."""

import queue
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from holdover.errors import TierError
from holdover.state.address import AddressChain, address_key, as_tokens
from holdover.state.layout import LAST_HIDDEN, ArraySpec, Layout
from holdover.state.node import Node, Saved
from holdover.state.pool import DevicePool, Slots
from holdover.state.segment import Kind, SegmentHeader
from holdover.state.tree import PrefixTree
from holdover.store.jobs import Change, Done, LoadDone, LoadJob, LoadPart, PrefixContext, SaveDone, SaveJob
from holdover.store.memory import MemoryTier
from holdover.store.objects import disk_tier
from holdover.store.queues import AT_ONCE_BYTES, Store

ROW = ArraySpec("keys", (1024,), torch.float32)


def save_job(
    layout: Layout, pool: DevicePool, num_tokens: int, first: int = 0
) -> tuple[Saved, Node, Slots, torch.Tensor, SaveJob]:
    """Random rows on the device, and the job that saves them."""
    tree = PrefixTree(layout, pool)
    tokens = as_tokens(np.arange(first, first + num_tokens))
    chain = AddressChain(address_key("model"), tokens)
    slots = pool.allocate(num_tokens)
    assert slots is not None
    rows = torch.randint(0, 255, (num_tokens, pool.slot_bytes), dtype=torch.uint8)
    pool.write_rows(slots, rows)
    node, slots = tree.extend(tree.root(chain.address(0)), tokens, slots)
    address, tip, space = chain.address(1), chain.address(num_tokens), chain.address(0)
    saved = Saved(Kind.ROWS, address, 0, num_tokens, tip)
    header = SegmentHeader(Kind.ROWS, "model", space, address, space, space, tip, 0, num_tokens)
    tree.saved.register(saved, [node])
    context = PrefixContext("model", space, chain, tokens, None)
    return saved, node, slots, rows, SaveJob(context, saved, header, slots, node)


@pytest.mark.parametrize("num_tokens", [3, AT_ONCE_BYTES // ROW.nbytes, AT_ONCE_BYTES // ROW.nbytes + 1])
def test_a_load_runs_at_once_only_if_it_is_small(num_tokens: int) -> None:
    layout = Layout((ROW,), (ArraySpec(LAST_HIDDEN, (8,), torch.float32),))
    pool = DevicePool(layout, 16 << 20, 1, torch.device("cpu"))
    done: queue.SimpleQueue[tuple[int, Done]] = queue.SimpleQueue()
    store = Store(pool, "model", [MemoryTier(64 << 20)], lambda each: done.put((threading.get_ident(), each)))
    saved, node, slots, rows, job = save_job(layout, pool, num_tokens)
    store.save(job)
    _, ended = done.get(timeout=10)
    assert isinstance(ended, SaveDone) and ended.kept
    saved.tiers.add("memory")
    pool.write_rows(slots, torch.zeros_like(rows))
    store.load(LoadJob([LoadPart(saved, node, 0, num_tokens, slots, node.tokens)], None, 0, None))
    thread, ended = done.get(timeout=10)
    assert isinstance(ended, LoadDone) and ended.ok
    assert torch.equal(pool.read_rows(slots), rows)
    assert (thread == threading.get_ident()) == (rows.numel() <= AT_ONCE_BYTES)
    store.close()


def test_a_load_at_once_never_waits_for_a_tier_that_may_be_slow(tmp_path: Path) -> None:
    """The memory tier has lost the segment that the tree still knows there: the disk is read on the loader's thread."""
    layout = Layout((ROW,), (ArraySpec(LAST_HIDDEN, (8,), torch.float32),))
    pool = DevicePool(layout, 16 << 20, 1, torch.device("cpu"))
    done: queue.SimpleQueue[tuple[int, Done]] = queue.SimpleQueue()
    memory, disk = MemoryTier(64 << 20), disk_tier(tmp_path, 64 << 20)
    store = Store(pool, "model", [memory, disk], lambda each: done.put((threading.get_ident(), each)))
    saved, node, slots, rows, job = save_job(layout, pool, 5)
    store.save(job)
    done.get(timeout=10)
    saved.tiers.update(("memory", "disk"))
    memory.delete(saved.name)
    pool.write_rows(slots, torch.zeros_like(rows))
    store.load(LoadJob([LoadPart(saved, node, 0, 5, slots, node.tokens)], None, 0, None))
    thread, ended = done.get(timeout=10)
    assert isinstance(ended, LoadDone) and ended.ok and ended.tokens_by_tier() == {"disk": 5}
    assert [each.change for each in ended.job.changes] == [Change.LOST, Change.PROMOTED]
    assert thread != threading.get_ident()
    assert torch.equal(pool.read_rows(slots), rows)
    store.close()


class Stubborn(MemoryTier):
    """A tier that cannot delete for a while."""

    stuck = True

    def delete(self, name: str, parent: str | None = None) -> None:
        if self.stuck:
            raise TierError("read-only")
        super().delete(name)


def test_what_cannot_be_removed_goes_before_anything_else_is_saved() -> None:
    layout = Layout((ROW,), (ArraySpec(LAST_HIDDEN, (8,), torch.float32),))
    pool = DevicePool(layout, 16 << 20, 1, torch.device("cpu"))
    tier, now, done = Stubborn(64 << 20), [0.0], list[Done]()
    store = Store(pool, "model", [tier], done.append, start_worker=None, clock=lambda: now[0])
    saved, *_, job = save_job(layout, pool, 3)
    other, *_, other_job = save_job(layout, pool, 5, first=7)
    store.save(job)
    saved.tiers.add("memory")
    store.delete(saved.name, saved.tiers)
    assert tier.has(saved.name)
    now[0] += 60
    store.save(other_job)
    assert isinstance(done[-1], SaveDone) and not done[-1].kept, "still stuck"
    tier.stuck = False
    now[0] += 60
    store.save(other_job)
    assert isinstance(done[-1], SaveDone) and done[-1].kept
    assert list(tier.scan()) == [other.name]


def test_what_is_saved_again_is_not_removed_after_all() -> None:
    layout = Layout((ROW,), (ArraySpec(LAST_HIDDEN, (8,), torch.float32),))
    pool = DevicePool(layout, 16 << 20, 1, torch.device("cpu"))
    tier, done = Stubborn(64 << 20), list[Done]()
    store = Store(pool, "model", [tier], done.append, start_worker=None)
    saved, *_, job = save_job(layout, pool, 3)
    store.save(job)
    store.remove_later("memory", [saved.name])
    tier.stuck = False
    store.save(job)
    assert list(tier.scan()) == [saved.name]

"""A restart: everything whole is found again, and what can't be used is removed, now or later."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from holdover.errors import TierError
from holdover.models.oracle import WINDOW, Oracle
from holdover.state.address import Tokens
from holdover.state.integrity import check_integrity
from holdover.state.node import Node, path_to
from holdover.state.pool import DevicePool
from holdover.state.tree import PrefixTree
from holdover.store.objects import ObjectTier, disk_tier
from holdover.store.recovery import Recovery, recover
from tests.engine.harness import Bench

PROMPT = random.Random(3).choices(range(256), k=120)


def filled(kind: str, folder: Path) -> ObjectTier:
    tier = disk_tier(folder, 16 << 20)
    bench = Bench(Oracle(kind), tiers=(tier,))
    bench.ask(PROMPT[:80], 1)
    bench.ask(PROMPT, 1)
    bench.ask([*PROMPT[:90], 1, 2, 3], 1)
    return disk_tier(folder, 16 << 20)


def restarted(kind: str, tier: ObjectTier) -> tuple[PrefixTree, Recovery]:
    model = Oracle(kind)
    tree = PrefixTree(model.layout, DevicePool(model.layout, 1 << 20, 2, torch.device("cpu")))
    found = recover(tree, tier, model.fingerprint)
    check_integrity(tree)
    return tree, found


@pytest.mark.parametrize("kind", ["hybrid", "dense", "recurrent", "sliding", "mixed", "everything"])
def test_all_that_was_saved_is_found_again(kind: str, tmp_path: Path) -> None:
    tier = filled(kind, tmp_path)
    names = list(tier.scan())
    tree, found = restarted(kind, tier)
    kinds = [name.split(".")[-1] for name in names]
    assert (found.rows, found.snapshots, found.windows) == tuple(map(kinds.count, ("rows", "snapshot", "window")))
    assert (found.foreign, found.unusable) == (0, 0)
    known = {saved.name for node in tree.nodes() for saved in (node.rows, node.snapshot, *node.windows_saved) if saved}
    assert known == set(names)
    if found.windows:
        for node in tree.nodes():
            if node.snapshot is not None and node.end > WINDOW:
                assert tree.match(tree.root(node.space), tokens_to(node)).position == node.end


def tokens_to(node: Node) -> Tokens:
    return np.concatenate([each.tokens for each in path_to(node)])


def test_a_tier_may_keep_the_rest_of_what_another_begins(tmp_path: Path) -> None:
    near, far = filled("mixed", tmp_path / "near"), filled("mixed", tmp_path / "far")
    model = Oracle("mixed")
    whole, _ = restarted("mixed", far)
    first = next(node for node in whole.nodes() if node.start == 0 and node.rows is not None)
    assert first.rows is not None
    far.delete(first.rows.name)
    tree = PrefixTree(model.layout, DevicePool(model.layout, 1 << 20, 2, torch.device("cpu")))
    assert recover(tree, near, model.fingerprint).unusable == 0
    found = recover(tree, far, model.fingerprint)
    check_integrity(tree)
    assert (found.unusable, found.left_behind) == (0, [])
    assert found.snapshots > 0


def test_another_models_state_is_left_alone(tmp_path: Path) -> None:
    tier = filled("mixed", tmp_path)
    count = len(list(tier.scan()))
    _, found = restarted("hybrid", tier)
    assert (found.rows, found.foreign) == (0, count)
    assert len(list(tier.scan())) == count


def test_windows_and_snapshots_without_their_rows_are_removed(tmp_path: Path) -> None:
    tier = filled("mixed", tmp_path)
    for name in [name for name in tier.scan() if name.endswith(".rows")]:
        tier.delete(name)
    left = len(list(tier.scan()))
    _, found = restarted("mixed", tier)
    assert found.unusable == left
    assert list(tier.scan()) == []


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = filled("mixed", tmp_path)
    for name in [name for name in tier.scan() if name.endswith(".rows")]:
        tier.delete(name)

    def stuck(name: str) -> None:
        raise TierError("read-only")

    monkeypatch.setattr(tier, "delete", stuck)
    _, found = restarted("mixed", tier)
    assert sorted(found.left_behind) == sorted(tier.scan())

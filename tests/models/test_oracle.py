"""The oracle: what it says depends on every token and on every part of its state, and not on how it is fed."""

import random

import pytest
import torch

from holdover.errors import ModelError
from holdover.models.oracle import KINDS, VOCAB_SIZE, WINDOW, Oracle
from holdover.models.registry import load_model
from holdover.state.layout import LAST_HIDDEN
from tests.engine.harness import Bench
from tests.simulation.reference import Reference

PROMPT = random.Random(1).choices(range(256), k=150)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def reach(kind: str) -> int:
    """How many of the last tokens an oracle's output depends on: of two layers with sliding windows, only so many."""
    return 2 * WINDOW - 1 if kind == "sliding" else len(PROMPT)


def bench(kind: str, seed: int = 0, **options: object) -> Bench:
    return Bench(Oracle(kind, seed), device_bytes=1 << 20, max_running=3, **options)


@EVERY_KIND
def test_it_says_what_its_definition_says_however_it_is_cut_into_chunks(kind: str) -> None:
    reference = Reference(kind, seed=7)
    for chunk in (1, 2, 13, 64, 1000):
        for length in (1, 2, 3, 4, 5, 150):
            answer = bench(kind, 7, max_batch_tokens=chunk).ask(PROMPT[:length], 6)
            assert answer == reference.answer(PROMPT[:length], 6)


@EVERY_KIND
def test_every_token_matters(kind: str) -> None:
    reference = Reference(kind)
    digest = reference.state_after(PROMPT)[-1]
    for position in range(len(PROMPT) - reach(kind), len(PROMPT)):
        changed = list(PROMPT)
        changed[position] ^= 1
        assert reference.state_after(changed)[-1] != digest
    swapped = [*PROMPT[:-40], PROMPT[-39], PROMPT[-40], *PROMPT[-38:]]
    assert reference.state_after(swapped)[-1] != digest


@EVERY_KIND
def test_every_row_and_every_part_of_a_snapshot_matters(kind: str) -> None:
    def continued(damage) -> list[int]:
        made = bench(kind)
        made.ask(PROMPT, 1)
        tree = made.tree
        root = next(iter(tree._roots.values()))
        match = tree.match(root, torch.tensor(PROMPT).numpy().astype("<u4"))
        assert match.position == len(PROMPT)
        damage(made, match.node)
        return made.ask([*PROMPT, 5], 8)

    right = Reference(kind).answer([*PROMPT, 5], 8)
    assert continued(lambda *_: None) == right
    layout = Oracle(kind).layout
    for field in layout.snapshot_fields:
        if field.spec.name == LAST_HIDDEN:
            continue  # read only where nothing follows: below

        def spoil(made: Bench, node, field=field) -> None:
            kept = made.pool.read_rows(node.snapshot_slots).flatten()
            kept[field.start] ^= 1
            made.pool._write(node.snapshot_slots, kept.view(made.pool.slots_per_snapshot, -1))

        assert continued(spoil) != right, field.spec.name
    for field in layout.token_fields:
        for position in (0, 77, 149):

            def spoil_row(made: Bench, node, field=field, position=position) -> None:
                slot = made.tree.slots_of(node)[position]
                made.pool.arena[slot, field.start] ^= 1

            assert continued(spoil_row) != right, (field.spec.name, position)
    for index, page in enumerate(layout.window_pages):
        for field in page.fields:
            for row in range(1 - WINDOW, 0):

                def spoil_window(made: Bench, node, index=index, field=field, row=row) -> None:
                    assert len(made.tree.window_of(node, len(PROMPT) + 1 - WINDOW)) == WINDOW - 1
                    made.pool.arena[made.tree.window_of(node, len(PROMPT) + row)[0, index], field.start] ^= 1

                assert continued(spoil_window) != right, (field.spec.name, row)


def test_the_last_hidden_vector_matters() -> None:
    made = bench("hybrid")
    first = made.ask(PROMPT, 4)
    node = next(node for node in made.tree.nodes() if node.end == len(PROMPT))
    kept = made.pool.read_rows(node.snapshot_slots).flatten()
    field = next(field for field in made.pool.layout.snapshot_fields if field.spec.name == LAST_HIDDEN)
    field.view(kept[None])[0, 3] += 1
    made.pool._write(node.snapshot_slots, kept.view(made.pool.slots_per_snapshot, -1))
    assert made.ask(PROMPT, 4)[0] != first[0]


@EVERY_KIND
def test_another_seed_is_another_model(kind: str) -> None:
    assert Oracle(kind, 1).fingerprint != Oracle(kind, 2).fingerprint
    assert bench(kind, 1).ask(PROMPT, 6) != bench(kind, 2).ask(PROMPT, 6)


def test_its_names() -> None:
    assert load_model("oracle:").fingerprint == Oracle("hybrid").fingerprint
    assert load_model("oracle:dense:5").fingerprint == Oracle("dense", 5).fingerprint
    assert load_model("oracle:").vocab_size == VOCAB_SIZE
    for name in ("oracle:nothing", "oracle:hybrid:x", "oracle:hybrid:-1", f"oracle:hybrid:{1 << 70}"):
        with pytest.raises(ModelError, match="KIND"):
            load_model(name)

"""Layouts: every byte has one place, and unlike states have unlike names."""

import pytest
import torch

from holdover.state.layout import LAST_HIDDEN, ArraySpec, Layout


def layout(dtype: torch.dtype = torch.bfloat16, recurrent: bool = True) -> Layout:
    snapshot = [ArraySpec("layers.0.conv", (3, 24), dtype)]
    if recurrent:
        snapshot.append(ArraySpec("layers.0.recurrent", (2, 4, 4), torch.float32))
    hidden = ArraySpec(LAST_HIDDEN, (8,), dtype)
    snapshots = (*snapshot, hidden) if recurrent else (hidden,)
    return Layout((ArraySpec("layers.1.latent", (20,), dtype), ArraySpec("layers.2.kv", (2, 2, 4), dtype)), snapshots)


def test_bytes_are_the_sum_of_the_arrays() -> None:
    made = layout()
    assert made.bytes_per_token == (20 + 16) * 2
    assert made.bytes_per_snapshot == 32 * 4 + 72 * 2 + 8 * 2


def test_arrays_lie_apart_and_are_written_in_place() -> None:
    made = layout()
    rows = torch.zeros(3, made.bytes_per_token, dtype=torch.uint8)
    views = {part.spec.name: part.view(rows) for part in made.token_fields}
    views["layers.1.latent"].fill_(1.0)
    assert (views["layers.2.kv"] == 0).all()
    assert views["layers.2.kv"].shape == (3, 2, 2, 4)
    assert int((rows != 0).sum()) > 0


def test_a_model_without_recurrent_arrays_can_be_resumed_anywhere() -> None:
    assert not layout().resumes_anywhere
    assert layout(recurrent=False).resumes_anywhere


def test_an_array_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        Layout((ArraySpec("a", (1,), torch.float32), ArraySpec("a", (2,), torch.float32)), ())


def test_fingerprints_differ_by_weights_configuration_and_dtype() -> None:
    names = {
        layout().fingerprint("w", {"a": 1}),
        layout().fingerprint("other weights", {"a": 1}),
        layout().fingerprint("w", {"a": 2}),
        layout(torch.float32).fingerprint("w", {"a": 1}),
        layout(recurrent=False).fingerprint("w", {"a": 1}),
    }
    assert len(names) == 5
    assert layout().fingerprint("w", {"a": 1}) in names

"""Segments: whole and unaltered, or refused; never a crash."""

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.state.address import as_tokens
from holdover.state.segment import DamagedSegment, Kind, SegmentHeader, decode, encode, segment_bytes
from tests.state.test_layout import layout

LAYOUT = layout()
ADDRESS, SPACE = bytes(range(32)), bytes(32)


def rows_segment(count: int = 5) -> tuple[torch.Tensor, SegmentHeader, torch.Tensor]:
    header = SegmentHeader(Kind.ROWS, "model", SPACE, ADDRESS, SPACE, 7, 7 + count)
    rows = torch.randint(0, 256, (count, LAYOUT.bytes_per_token), dtype=torch.uint8)
    return encode(header, LAYOUT, lambda place: place.copy_(rows), as_tokens(range(count))), header, rows


def snapshot_segment() -> tuple[torch.Tensor, SegmentHeader, torch.Tensor]:
    header = SegmentHeader(Kind.SNAPSHOT, "model", SPACE, ADDRESS, SPACE, 12, 12)
    state = torch.randint(0, 256, (LAYOUT.bytes_per_snapshot,), dtype=torch.uint8)
    return encode(header, LAYOUT, lambda place: place.copy_(state)), header, state


def test_rows_come_back_bit_for_bit() -> None:
    buffer, header, rows = rows_segment()
    segment = decode(buffer, LAYOUT, "model", header.name)
    assert segment.header == header
    assert segment.rows is not None
    assert torch.equal(segment.rows, rows)
    assert segment.tokens.tolist() == [0, 1, 2, 3, 4]
    assert len(buffer) == segment_bytes(header, LAYOUT)


def test_snapshots_come_back_bit_for_bit() -> None:
    buffer, header, state = snapshot_segment()
    segment = decode(buffer, LAYOUT, "model", header.name)
    assert segment.snapshot is not None
    assert torch.equal(segment.snapshot, state)


def test_any_safetensors_tool_reads_a_segment() -> None:
    buffer, _, rows = rows_segment()
    arrays = safetensors.torch.load(buffer.numpy().tobytes())
    assert arrays["tokens"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["rows"].dtype == torch.bfloat16
    assert torch.equal(arrays["rows"].view(torch.uint8), rows)
    buffer, _, state = snapshot_segment()
    arrays = safetensors.torch.load(buffer.numpy().tobytes())
    assert set(arrays) == {spec.name for spec in LAYOUT.snapshot_arrays}
    assert sum(array.nbytes for array in arrays.values()) == LAYOUT.bytes_per_snapshot, "each array is there once"
    first = LAYOUT.snapshot_fields[0]
    assert torch.equal(arrays[first.spec.name].flatten().view(torch.uint8), state[: first.spec.nbytes])


@settings(max_examples=300)
@given(st.data())
def test_a_changed_byte_is_never_served(data: st.DataObject) -> None:
    buffer, header, _ = data.draw(st.sampled_from([rows_segment(), snapshot_segment()]))
    broken = buffer.clone()
    place = data.draw(st.integers(0, len(broken) - 1))
    broken[place] = int(broken[place]) ^ data.draw(st.integers(1, 255))
    with pytest.raises(DamagedSegment):
        decode(broken, LAYOUT, "model", header.name)


@given(st.data())
def test_a_truncated_segment_is_never_served(data: st.DataObject) -> None:
    buffer, header, _ = rows_segment()
    with pytest.raises(DamagedSegment):
        decode(buffer[: data.draw(st.integers(0, len(buffer) - 1))].clone(), LAYOUT, "model", header.name)


@given(st.binary(max_size=400))
def test_no_bytes_crash_the_decoder(content: bytes) -> None:
    buffer = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
    with pytest.raises(DamagedSegment):
        decode(buffer, LAYOUT, "model", "name")


def test_another_models_segment_is_refused_by_name() -> None:
    buffer, header, _ = rows_segment()
    with pytest.raises(DamagedSegment, match="another model"):
        decode(buffer, LAYOUT, "other", header.name)
    with pytest.raises(DamagedSegment, match="arrays"):
        decode(buffer, layout(torch.float32), "model", header.name)
    with pytest.raises(DamagedSegment, match="name of another"):
        decode(buffer, LAYOUT, "model", "elsewhere")

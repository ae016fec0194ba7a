"""Segments: whole and unaltered, or refused; never a crash."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128

from holdover.state.address import as_tokens
from holdover.state.layout import ArraySpec, Layout
from holdover.state.segment import (
    BLOCK_BYTES,
    DamagedSegment,
    Kind,
    OtherFormat,
    SegmentHeader,
    decode,
    encode,
    segment_bytes,
)
from tests.state.test_layout import layout

WINDOW = (ArraySpec("layers.3.kv", (2, 2, 4), torch.bfloat16), ArraySpec("layers.4.kv", (2, 2, 4), torch.bfloat16))
LAYOUT = Layout(layout().token_arrays, layout().snapshot_arrays, WINDOW, window=8)
ADDRESS, SPACE, PARENT, TIP = bytes(range(32)), bytes(32), b"p" * 32, b"t" * 32


def filling(rows: torch.Tensor) -> Callable[[torch.Tensor, int], object]:
    return lambda place, first: place.copy_(rows[first : first + len(place)])


def rows_segment(count: int = 5) -> tuple[torch.Tensor, SegmentHeader, torch.Tensor]:
    header = SegmentHeader(Kind.ROWS, "model", SPACE, ADDRESS, PARENT, PARENT, TIP, 7, 7 + count)
    rows = torch.randint(0, 256, (count, LAYOUT.bytes_per_token), dtype=torch.uint8)
    return (
        encode(header, LAYOUT, filling(rows), as_tokens(range(count))),
        header,
        rows,
    )


def snapshot_segment() -> tuple[torch.Tensor, SegmentHeader, torch.Tensor]:
    header = SegmentHeader(Kind.SNAPSHOT, "model", SPACE, ADDRESS, PARENT, PARENT, ADDRESS, 12, 12)
    state = torch.randint(0, 256, (LAYOUT.bytes_per_snapshot,), dtype=torch.uint8)
    return encode(header, LAYOUT, lambda place, _: place.copy_(state)), header, state


def window_segment(count: int = 4) -> tuple[torch.Tensor, SegmentHeader, torch.Tensor]:
    header = SegmentHeader(
        Kind.WINDOW, "model", SPACE, ADDRESS, PARENT, PARENT, TIP, 8, 8 + count, block=4, rows_tip=PARENT
    )
    rows = torch.randint(0, 256, (count, LAYOUT.bytes_per_window_row), dtype=torch.uint8)
    return encode(header, LAYOUT, filling(rows), as_tokens(range(count))), header, rows


def test_window_rows_come_back_bit_for_bit() -> None:
    buffer, header, rows = window_segment()
    segment = decode(buffer, LAYOUT, "model", header.name)
    assert (segment.header, segment.snapshot) == (header, None)
    assert segment.rows is not None
    assert torch.equal(segment.rows, rows)
    assert len(buffer) == segment_bytes(header, LAYOUT)
    arrays = safetensors.torch.load(buffer.numpy().tobytes())
    assert arrays["rows"].dtype == torch.bfloat16
    assert torch.equal(arrays["rows"].view(torch.uint8), rows)


def test_window_rows_are_not_served_to_a_model_without_windows() -> None:
    buffer, header, _ = window_segment()
    with pytest.raises(DamagedSegment, match="no sliding window"):
        decode(buffer, layout(), "model", header.name)


@pytest.mark.parametrize(
    ("start", "end", "block", "why"),
    [(8, 12, 2, "two blocks|no sense"), (7, 9, 4, "two blocks"), (8, 16, 8, "a block of 8"), (8, 12, 0, "no sense")],
)
def test_window_rows_of_other_blocks_are_refused(start: int, end: int, block: int, why: str) -> None:
    """Whoever cuts them elsewhere could save them twice."""
    header = SegmentHeader(
        Kind.WINDOW,
        "model",
        SPACE,
        ADDRESS,
        PARENT,
        PARENT,
        TIP,
        start,
        end,
        parent_window=True,
        block=block,
        rows_tip=PARENT,
    )
    rows = torch.zeros(end - start, LAYOUT.bytes_per_window_row, dtype=torch.uint8)
    buffer = encode(header, LAYOUT, filling(rows), as_tokens(range(end - start)))
    with pytest.raises(DamagedSegment, match=why):
        decode(buffer, LAYOUT, "model", header.name)


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
    buffer, header, _ = data.draw(st.sampled_from([rows_segment(), snapshot_segment(), window_segment()]))
    broken = buffer.clone()
    place = data.draw(st.integers(0, len(broken) - 1))
    broken[place] = int(broken[place]) ^ data.draw(st.integers(1, 255))
    with pytest.raises(DamagedSegment):
        decode(broken, LAYOUT, "model", header.name)


@given(st.data())
def test_a_truncated_segment_is_never_served(data: st.DataObject) -> None:
    buffer, header, _ = data.draw(st.sampled_from([rows_segment, window_segment]))()
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


# What a decoder takes as it stands: the finder checks it, and so does whoever asked for a range of tokens.
PROVENANCE = ("space", "parent", "parent_tip", "tip", "rows_tip", "start", "end", "checksum", "__metadata__")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def resealed(header: bytes, data: bytes, checksum: bool = True) -> torch.Tensor:
    """A file with this header and this data whose checksum holds, as an enemy would make it."""
    header += b" " * (-len(header) % 8)
    content = bytearray(len(header).to_bytes(8, "little") + header + data)
    place = content.find(b'"checksum":"')
    if checksum and place >= 0:
        place += len(b'"checksum":"')
        content[place : place + 32] = b"0" * 32
        content[place : place + 32] = xxh3_128(bytes(content)).hexdigest().encode()
    return torch.frombuffer(content, dtype=torch.uint8)


@settings(max_examples=300)
@given(st.data())
def test_no_header_crashes_the_decoder_or_is_served_for_another(data: st.DataObject) -> None:
    """Any field of the header, or the description of any array, becomes something else, and the checksum holds."""
    buffer, header, rows = data.draw(st.sampled_from([rows_segment, snapshot_segment, window_segment]))()
    content = buffer.numpy().tobytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    where = entries["__metadata__"] if data.draw(st.booleans()) else entries
    key = data.draw(st.sampled_from(sorted(where)))
    before = where[key]
    where[key] = data.draw(JSON | st.sampled_from(["0", "-1", "7", "12", "99999999999999999999", header.address.hex()]))
    if data.draw(st.booleans()):
        where[data.draw(st.text(max_size=10))] = data.draw(JSON)
    made = resealed(json.dumps(entries, separators=(",", ":")).encode(), content[8 + length :])
    try:
        segment = decode(made, LAYOUT, "model", header.name)
    except DamagedSegment:
        return
    assert where.get(key) == before or key in PROVENANCE
    assert segment.header.name == header.name
    assert segment.header.fingerprint == "model"
    state = segment.rows if segment.rows is not None else segment.snapshot
    assert state is not None
    assert torch.equal(state, rows)


@given(st.binary(max_size=300), st.binary(max_size=50))
def test_no_sealed_bytes_crash_the_decoder(header: bytes, data: bytes) -> None:
    with pytest.raises(DamagedSegment):
        decode(resealed(header, data), LAYOUT, "model", f"{ADDRESS.hex()}.rows")


def test_decoding_copies_nothing() -> None:
    for make in (rows_segment, snapshot_segment, window_segment):
        buffer, header, _ = make()
        segment = decode(buffer, LAYOUT, "model", header.name)
        state = segment.rows if segment.rows is not None else segment.snapshot
        assert state is not None
        assert state.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        if header.kind is Kind.ROWS:
            assert np.shares_memory(segment.tokens, buffer.numpy())


def test_another_format_is_told_from_damage() -> None:
    buffer, header, _ = rows_segment()
    content = buffer.numpy().tobytes().replace(b"holdover-segment/5", b"holdover-segment/4")
    with pytest.raises(OtherFormat, match="holdover-segment/4"):
        decode(torch.frombuffer(bytearray(content), dtype=torch.uint8), LAYOUT, "model", header.name)


@pytest.mark.parametrize("checksum", ["\\udc00", "\\u00e9", "0" * 31, "g" * 32, ""])
def test_a_checksum_that_is_none_is_refused(checksum: str) -> None:
    """A lone surrogate is JSON, and no text: found by the test above."""
    buffer, header, _ = rows_segment()
    content = buffer.numpy().tobytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    entries["__metadata__"]["checksum"] = "CHECKSUM"
    made = json.dumps(entries, separators=(",", ":")).replace("CHECKSUM", checksum).encode()
    with pytest.raises(DamagedSegment):
        decode(resealed(made, content[8 + length :], checksum=False), LAYOUT, "model", header.name)


def test_long_segments_are_hashed_and_copied_in_blocks_and_damage_anywhere_is_noticed() -> None:
    count = 3 * BLOCK_BYTES // LAYOUT.bytes_per_token
    buffer, header, rows = rows_segment(count)
    segment = decode(buffer, LAYOUT, "model", header.name, check=False)
    assert segment.rows is not None
    ranges = list(segment.seal.blocks())
    assert len(ranges) in (3, 4)
    assert torch.equal(torch.cat([segment.rows[first:last] for first, last in ranges]), rows)
    assert encode(header, LAYOUT, filling(rows), as_tokens(range(count)), 1 << 30).equal(buffer), (
        "blocks leave no trace"
    )
    for place in (len(buffer) - 1, len(buffer) // 2, len(buffer) - 4 * count):
        broken = buffer.clone()
        broken[place] ^= 1
        damaged = decode(broken, LAYOUT, "model", header.name, check=False)
        with pytest.raises(DamagedSegment, match="checksum"):
            list(damaged.seal.blocks())

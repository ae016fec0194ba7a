"""Encryption at rest: what was kept comes back; what was altered, moved or sealed by another key does not."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdover.errors import HoldoverError, TierError
from holdover.state.segment import DamagedSegment, OtherFormat
from holdover.store.encryption import CHUNK_BYTES, START_BYTES, TAG_BYTES, Cipher
from holdover.store.keys import read_key
from holdover.store.objects import disk_tier
from tests.store.test_finding import PROMPT, bench, expected

KEY, OTHER = "a1" * 32, "b2" * 32
SIZES = st.sampled_from([0, 1, 100, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 200_000])


@given(SIZES, SIZES)
def test_what_was_sealed_comes_back_whole_or_from_its_beginning(size: int, start: int) -> None:
    content = os.urandom(size)
    cipher = Cipher(KEY)
    sealed = cipher.seal("a/b", memoryview(content))
    assert len(sealed) == size + cipher.overhead(size)
    assert bytes(cipher.open("a/b", memoryview(sealed))) == content
    beginning = memoryview(sealed)[: cipher.sealed_start(start)]
    assert bytes(cipher.open("a/b", beginning, len(sealed)))[:start] == content[:start]


@given(st.integers(0, 10**9), st.integers(0, 7), SIZES)
def test_a_flipped_bit_is_noticed(place: int, bit: int, size: int) -> None:
    cipher = Cipher(KEY)
    sealed = bytearray(cipher.seal("a/b", memoryview(bytes(size))))
    sealed[place % len(sealed)] ^= 1 << bit
    with pytest.raises(DamagedSegment):
        cipher.open("a/b", memoryview(sealed))


def test_chunks_cannot_be_moved_cut_or_taken_for_others() -> None:
    cipher, content = Cipher(KEY), os.urandom(3 * CHUNK_BYTES)
    sealed = cipher.seal("a/b", memoryview(content))
    step = CHUNK_BYTES + TAG_BYTES
    head, first, second, third = (
        sealed[:START_BYTES], *(sealed[START_BYTES + i * step : START_BYTES + (i + 1) * step] for i in range(3))
    )  # fmt: skip
    for altered in (head + second + first + third, head + first + second, head + first + third, head):
        with pytest.raises(DamagedSegment):
            cipher.open("a/b", memoryview(altered))
    with pytest.raises(DamagedSegment):
        cipher.open("a/c", memoryview(sealed))
    with pytest.raises(DamagedSegment):
        Cipher(OTHER).open("a/b", memoryview(sealed))
    with pytest.raises(OtherFormat):
        cipher.open("a/b", memoryview(content))
    assert cipher.seal("a/b", memoryview(content)) != sealed, "each time under another key"


def test_an_encrypted_folder_shows_nothing_and_resumes_to_the_token(tmp_path: Path) -> None:
    first = bench("hybrid", disk_tier(tmp_path, 16 << 20, cipher=Cipher(KEY)))
    assert first.ask(PROMPT, 3) == expected("hybrid", PROMPT)
    files = [file.read_bytes() for file in (tmp_path / "segments").rglob("*") if file.is_file()]
    assert files
    assert not any(b"safetensors" in each or b"fingerprint" in each for each in files)
    second = bench("hybrid", disk_tier(tmp_path, 16 << 20, cipher=Cipher(KEY)))
    assert second.ask([*PROMPT, 1], 3) == expected("hybrid", [*PROMPT, 1])
    assert second.engine.counters.tiers["disk"].tokens_loaded == len(PROMPT)
    size = sum(len(each) for each in files)
    assert first.engine.store.tiers[0].used_bytes() >= size, "what encryption adds counts too"


def test_the_key_must_be_the_folders(tmp_path: Path) -> None:
    bench("hybrid", disk_tier(tmp_path, 16 << 20, cipher=Cipher(KEY))).ask(PROMPT, 1)
    files = sorted(file.name for file in (tmp_path / "segments").rglob("*"))
    with pytest.raises(TierError, match="another key"):
        disk_tier(tmp_path, 16 << 20, cipher=Cipher(OTHER))
    with pytest.raises(TierError, match="--encryption-key-file") as raised:
        disk_tier(tmp_path, 16 << 20)
    assert KEY not in str(raised.value)
    assert sorted(file.name for file in (tmp_path / "segments").rglob("*")) == files, "nothing was touched"


def test_a_folder_that_was_not_encrypted_becomes_so_and_what_lies_there_is_not_read(tmp_path: Path) -> None:
    bench("hybrid", disk_tier(tmp_path, 16 << 20)).ask(PROMPT, 1)
    second = bench("hybrid", disk_tier(tmp_path, 16 << 20, cipher=Cipher(KEY)))
    assert second.ask(PROMPT, 3) == expected("hybrid", PROMPT)


def test_keys_are_read_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY.upper() + "\n")
    assert read_key(file, None) == read_key(None, KEY) == KEY
    assert read_key(None, None) is None
    file.write_text("secret")
    for source, environment in ((file, None), (None, "secret"), (tmp_path / "absent", None)):
        with pytest.raises(HoldoverError) as raised:
            read_key(source, environment)
        assert "secret" not in str(raised.value)
    assert KEY not in repr(Cipher(KEY))

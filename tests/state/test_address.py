"""Addresses: a function of model, salt and tokens, and of nothing else."""

import re
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from holdover.state.address import AddressChain, address_key, as_tokens

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=300)


def by_the_book(fingerprint: str, salt: str, tokens: list[int], position: int) -> bytes:
    """The documented construction, written out on its own."""
    key = blake3(
        fingerprint.encode() + b"\0" + salt.encode(), derive_key_context="holdover 2026 state address v1"
    ).digest()
    chain = bytes(32)
    for stride in range(position // 64):
        part = b"".join(token.to_bytes(4, "little") for token in tokens[64 * stride : 64 * stride + 64])
        chain = blake3(chain + part, key=key).digest()
    rest = b"".join(token.to_bytes(4, "little") for token in tokens[position // 64 * 64 : position])
    return blake3(chain + rest + position.to_bytes(8, "little"), key=key).digest()


@given(TOKENS, st.data())
def test_addresses_are_built_as_documented(tokens: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(tokens)))
    chain = AddressChain(address_key("model", "tenant"), as_tokens(tokens))
    assert chain.address(position) == by_the_book("model", "tenant", tokens, position)


@given(TOKENS, TOKENS)
def test_what_follows_a_prefix_does_not_change_its_address(tokens: list[int], more: list[int]) -> None:
    key = address_key("model")
    longer = AddressChain(key, as_tokens(tokens + more))
    longer.address(len(tokens) + len(more))
    assert longer.address(len(tokens)) == AddressChain(key, as_tokens(tokens)).address(len(tokens))


@given(TOKENS, TOKENS)
def test_unlike_prefixes_have_unlike_addresses(a: list[int], b: list[int]) -> None:
    key = address_key("model")
    same = AddressChain(key, as_tokens(a)).address(len(a)) == AddressChain(key, as_tokens(b)).address(len(b))
    assert same == (a == b)


def test_salt_and_fingerprint_are_in_every_address() -> None:
    tokens = as_tokens(range(100))
    keys = [address_key("model"), address_key("model", "salt"), address_key("other"), address_key("mod", "el")]
    for position in (0, 1, 64, 100):
        assert len({AddressChain(key, tokens).address(position) for key in keys}) == len(keys)


def test_the_documents_test_vectors() -> None:
    """Written down, so that a change of the construction is noticed, and other programs can check theirs."""
    document = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    vectors = re.findall(r"^\| (`\w+` )?\| (\d+) \| `([0-9a-f]{64})` \|$", document, re.MULTILINE)
    assert len(vectors) == 6
    for salt, position, address in vectors:
        chain = AddressChain(address_key("fingerprint", salt.strip("` ")), as_tokens(np.arange(200)))
        assert chain.address(int(position)).hex() == address


def test_a_position_past_the_end_is_refused() -> None:
    chain = AddressChain(address_key("model"), as_tokens([1, 2, 3]))
    for position in (-1, 4):
        with pytest.raises(IndexError, match="outside"):
            chain.address(position)

"""Addresses: digests that name "the state after exactly these tokens".

The address of a prefix depends only on the model's fingerprint, the salt and the tokens, never on how the prefix was
cut into segments. It is built in strides of 64 tokens, so that the address of any position costs at most one stride:

    key       = BLAKE3.derive_key("holdover 2026 state address v1", fingerprint (UTF-8) + 0x00 + salt (UTF-8))
    chain[0]  = 32 zero bytes
    chain[i]  = BLAKE3.keyed_hash(key, chain[i-1] + tokens[64(i-1) : 64i] as little-endian uint32)
    address p = BLAKE3.keyed_hash(key, chain[p // 64] + tokens[64(p // 64) : p] as little-endian uint32 + p as uint64)
"""

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

STRIDE = 64
KEY_CONTEXT = "holdover 2026 state address v1"

Tokens = NDArray[np.uint32]


def as_tokens(tokens: object) -> Tokens:
    """Token ids as a little-endian uint32 array, [tokens]."""
    return np.asarray(tokens, dtype="<u4")


def address_key(fingerprint: str, salt: str = "") -> bytes:
    """The 32-byte key of one model's state for one tenant; states under unlike keys can never find each other."""
    return blake3(fingerprint.encode() + b"\0" + salt.encode(), derive_key_context=KEY_CONTEXT).digest()


class AddressChain:
    """Addresses along one token sequence, in amortised O(new tokens). The array may be filled as the sequence grows."""

    def __init__(self, key: bytes, tokens: Tokens) -> None:
        self._key = key
        self._tokens = tokens
        self._chain = [bytes(32)]

    def fork(self, position: int, tokens: Tokens) -> "AddressChain":
        """A chain along `tokens`, the same as this one's up to `position`. This one may be in use meanwhile."""
        other = AddressChain(self._key, tokens)
        other._chain = self._chain[: position // STRIDE + 1]
        return other

    def address(self, position: int) -> bytes:
        """Address of the first `position` tokens, 32 bytes. Raises IndexError past the end of the sequence."""
        if not 0 <= position <= len(self._tokens):
            raise IndexError(f"position {position} is outside a sequence of {len(self._tokens)} tokens")
        strides = position // STRIDE
        while len(self._chain) <= strides:
            done = len(self._chain)
            part = self._tokens[(done - 1) * STRIDE : done * STRIDE]
            self._chain.append(blake3(self._chain[-1] + part.tobytes(), key=self._key).digest())
        rest = self._tokens[strides * STRIDE : position]
        material = self._chain[strides] + rest.tobytes() + position.to_bytes(8, "little")
        return blake3(material, key=self._key).digest()

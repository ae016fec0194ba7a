"""Encryption at rest: each object under a key of its own, in chunks, so that its head can be read alone.

An object is MAGIC, a salt, and chunks of 64 KiB, each sealed by AES-256-GCM with a tag of 16 bytes. The key is
HKDF-SHA256(key, salt, KEY_CONTEXT); the nonce is the chunk's number with a last byte that is 1 only for the last
chunk; the object's path is authenticated with each. So chunks can't be swapped, left out, or served under another
name. See docs/format.md.
"""

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from holdover.state.segment import DamagedSegment, OtherFormat

MAGIC = b"HOLDOVER-AESGCM1"
SALT_BYTES, TAG_BYTES, CHUNK_BYTES = 16, 16, 64 << 10
START_BYTES = len(MAGIC) + SALT_BYTES
KEY_CONTEXT = b"holdover 2026 segment encryption v1"


class Cipher:
    """Seals and opens whole objects, and the beginnings of objects."""

    def __init__(self, key: str) -> None:
        self._key = bytes.fromhex(key)

    def __repr__(self) -> str:
        return "Cipher(...)"

    @property
    def key_id(self) -> str:
        """Tells keys apart, and says nothing else about them."""
        return self._derive(b"key id").hex()[:32]

    def _derive(self, salt: bytes) -> bytes:
        return HKDF(SHA256(), 32, salt, KEY_CONTEXT).derive(self._key)

    @staticmethod
    def _nonce(chunk: int, last: bool) -> bytes:
        return chunk.to_bytes(11, "big") + bytes([last])

    @staticmethod
    def overhead(nbytes: int) -> int:
        """Bytes that sealing adds to so many."""
        return START_BYTES + TAG_BYTES * max(1, -(-nbytes // CHUNK_BYTES))

    @staticmethod
    def sealed_start(nbytes: int) -> int:
        """Bytes of a sealed object in which its first `nbytes` are."""
        return START_BYTES + (CHUNK_BYTES + TAG_BYTES) * max(1, -(-nbytes // CHUNK_BYTES))

    def seal(self, path: str, content: memoryview) -> bytes:
        """What is to be kept at `path` in place of `content`."""
        salt = os.urandom(SALT_BYTES)
        cipher, name = AESGCM(self._derive(salt)), path.encode()
        parts = [MAGIC, salt]
        count = max(1, -(-len(content) // CHUNK_BYTES))
        for chunk in range(count):
            part = content[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            parts.append(cipher.encrypt(self._nonce(chunk, chunk == count - 1), part, name))
        return b"".join(parts)

    def open(self, path: str, sealed: memoryview, size: int | None = None) -> bytearray:
        """The content of a sealed object, or, of an object of `size` bytes, the beginning that is there.

        Raises OtherFormat if it is not encrypted, DamagedSegment if it was altered, moved, or sealed by another key.
        """
        if bytes(sealed[: len(MAGIC)]) != MAGIC:
            raise OtherFormat("it is not encrypted, and this tier's segments are")
        whole = len(sealed) if size is None else size
        cipher, name = AESGCM(self._derive(bytes(sealed[len(MAGIC) : START_BYTES]))), path.encode()
        content = bytearray()
        step = CHUNK_BYTES + TAG_BYTES
        last = max(0, -(-(whole - START_BYTES) // step) - 1)
        for chunk, start in enumerate(range(START_BYTES, max(len(sealed), START_BYTES + 1), step)):
            part = sealed[start : start + step]
            if len(part) < min(step, whole - start):
                break  # the beginning ends within this chunk
            try:
                content += cipher.decrypt(self._nonce(chunk, chunk == last), part, name)
            except (InvalidTag, ValueError):
                raise DamagedSegment("its encryption does not hold") from None
        return content

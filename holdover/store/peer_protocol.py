"""What peers say to each other, and how they know each other: ZeroMQ over TCP, encrypted with CURVE.

Both key pairs, of who serves and of who asks, are derived from the secret that all peers share. So each side proves
that it has the secret, a handshake makes keys of its own for every connection (nothing can be replayed), and who has
not the secret is not heard. docs/design/peers.md.
"""

import ipaddress
import re

import msgspec
import zmq
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from holdover.errors import HoldoverError

PROTOCOL = 1
MOST_REQUEST_BYTES = 4096
SEGMENT_NAME = re.compile(r"[0-9a-f]{64}\.(rows|snapshot|window)")
MOST_HEAD_BYTES = 64 << 20
ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):(?P<port>\d{1,5})")


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """The segment `name`, or only its first `nbytes` bytes. parent: names the segment that it goes on from. An empty
    name asks whether anybody is there."""

    protocol: int
    name: str
    nbytes: int | None = None
    parent: str | None = None

    @property
    def makes_sense(self) -> bool:
        """Whether it names what can be a segment: nothing else ever becomes part of a path."""
        names = (self.name, *([] if self.parent is None else [self.parent]))
        return all(map(SEGMENT_NAME.fullmatch, names)) and (self.nbytes is None or 0 < self.nbytes <= MOST_HEAD_BYTES)


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """status: ok (the bytes follow in a frame of their own), absent, failed, or not understood."""

    protocol: int
    status: str


OK, ABSENT, FAILED, NOT_UNDERSTOOD = "ok", "absent", "failed", "not understood"


def key_pair(secret: str, role: str) -> tuple[bytes, bytes]:
    """Public and secret CURVE key, as Z85, of who serves (`server`) or asks (`client`). secret: 64 hex digits."""
    seed = HKDF(SHA256(), 32, b"", f"holdover 2026 peer {role} v1".encode()).derive(bytes.fromhex(secret))
    own: bytes = z85.encode(seed)
    return zmq.curve_public(own), own


def parse_address(text: str, setting: str) -> str:
    """`tcp://HOST:PORT` from HOST:PORT. Raises HoldoverError, which names the setting."""
    found = ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise HoldoverError(f"{setting} {text!r} must be HOST:PORT, for example 10.0.0.5:7700.")
    return f"tcp://{text}"


def listening_address(text: str) -> str:
    """As `parse_address`, for an address to listen on: a host's name is for others to find it, not to bind to."""
    address = parse_address(text, "--peer-listen")
    host = text.rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if host != "localhost":
            raise HoldoverError(
                f"--peer-listen {text!r} must name an address of this machine, such as 127.0.0.1:7700 or 0.0.0.0:7700."
            ) from None
        return address.replace("localhost", "127.0.0.1")
    return address


def require_curve() -> None:
    """Raises HoldoverError if this build of ZeroMQ can't encrypt."""
    if not zmq.has("curve"):
        raise HoldoverError(
            "this pyzmq was built without CURVE, so peers can't know each other. Install pyzmq from PyPI: "
            "pip install --force-reinstall pyzmq"
        )

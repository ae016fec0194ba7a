"""The peer tier: what the tiers of another Holdover process keep, read over the network. Nothing is written there."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import msgspec
import numpy as np
import torch
import zmq

from holdover.config import NO_LIMIT
from holdover.errors import TierError
from holdover.state.segment import Link
from holdover.store.peer_protocol import ABSENT, OK, PROTOCOL, Answer, Ask, key_pair, parse_address, require_curve
from holdover.store.tier import ALONE, PutResult, PutStatus

HEAD_SECONDS, SEGMENT_SECONDS, CONNECT_SECONDS = 2.0, 30.0, 1.0
MOST_KNOWN = 1 << 20  # names that it has shown to keep; then the oldest are forgotten, and asked for again


class PeerTier:
    """One other process. What it keeps is found by asking, and read when it is needed; it evicts as it likes."""

    immediate = False
    shared = True
    claims = False
    opened = True
    budget_bytes = NO_LIMIT

    def __init__(self, address: str, secret: str, name: str = "peer") -> None:
        """address: HOST:PORT. Raises HoldoverError. That nobody answers there (yet) is no error."""
        require_curve()
        self.name = name
        self.address = address
        self._url = parse_address(address, "--tier peer:")
        self._server_key, _ = key_pair(secret, "server")
        self._keys = key_pair(secret, "client")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._known: dict[str, None] = {}

    def _socket(self) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] | None = getattr(self._local, "socket", None)
        if socket is None or socket.closed:
            socket = self._context.socket(zmq.REQ)
            socket.curve_serverkey = self._server_key
            socket.curve_publickey, socket.curve_secretkey = self._keys
            for option, value in (
                (zmq.LINGER, 0), (zmq.IMMEDIATE, 1), (zmq.REQ_RELAXED, 1), (zmq.REQ_CORRELATE, 1),
                (zmq.SNDTIMEO, int(CONNECT_SECONDS * 1000)), (zmq.IPV6, "[" in self.address),
                (zmq.HEARTBEAT_IVL, 5000), (zmq.HEARTBEAT_TIMEOUT, 15000),
            ):  # fmt: skip
                socket.setsockopt(option, value)
            socket.connect(self._url)
            self._local.socket = socket
        return socket

    def _ask(self, ask: Ask, seconds: float) -> memoryview | None:
        """What the peer has to say, None if it has no such segment. Raises TierError."""
        socket = self._socket()
        try:
            socket.send(msgspec.msgpack.encode(ask))
            if not socket.poll(int(seconds * 1000)):
                raise zmq.Again
            frames = socket.recv_multipart(copy=False)
            answer = msgspec.msgpack.decode(frames[0].buffer, type=Answer)
        except zmq.Again:
            socket.close()  # what comes late is nobody's any more
            raise TierError(
                f"the {self.name} tier {self.address} does not answer: it is down, can't be reached, or has another "
                "secret"
            ) from None
        except (zmq.ZMQError, msgspec.MsgspecError) as error:
            socket.close()
            raise TierError(f"asking the {self.name} tier {self.address} failed: {error}") from error
        if answer.status == ABSENT:
            return None
        if answer.protocol != PROTOCOL or answer.status != OK or len(frames) > 2:
            raise TierError(f"the {self.name} tier {self.address} could not answer ({answer.status[:40]})")
        return frames[1].buffer if len(frames) == 2 else memoryview(b"")

    def answers(self) -> bool:
        """Whether somebody with the secret is there now."""
        try:
            return self._ask(Ask(PROTOCOL, ""), HEAD_SECONDS) is not None
        except TierError:
            return False

    # The calls of a tier

    def has(self, name: str) -> bool:
        with self._lock:
            return name in self._known

    @contextmanager
    def get(self, name: str) -> Iterator[torch.Tensor | None]:
        content = self._ask(Ask(PROTOCOL, name), SEGMENT_SECONDS)
        if content is None:
            self.delete(name)
            yield None
            return
        yield torch.from_numpy(np.frombuffer(content, dtype=np.uint8))

    def put(self, name: str, nbytes: int, make: Callable[[], torch.Tensor], link: Link = ALONE) -> PutResult:
        return PutResult(PutStatus.REFUSED)

    def head(self, name: str, nbytes: int, parent: str | None) -> bytes | None:
        content = self._ask(Ask(PROTOCOL, name, nbytes, parent), HEAD_SECONDS)
        if content is None:
            self.delete(name)
            return None
        return bytes(content)

    def heads(self, names: Iterable[str], nbytes: int) -> dict[str, bytes]:
        return {}

    def adopt(self, name: str, nbytes: int, link: Link) -> bool:
        with self._lock:
            self._known[name] = None
            if len(self._known) > MOST_KNOWN:
                for old in list(islice(self._known, MOST_KNOWN // 8)):
                    del self._known[old]
        return True

    def delete(self, name: str, parent: str | None = None) -> None:
        """It is not there, or not to be relied on. The peer is asked again when it is next looked for."""
        with self._lock:
            self._known.pop(name, None)

    def claim(self, name: str, content: bytes) -> bytes | None:
        return None

    def claimed(self, name: str) -> bytes | None:
        return None

    def unclaim(self, name: str) -> None:
        """Nothing is written there."""

    def scan(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._known))

    def touch(self, names: list[str]) -> None:
        """The peer marks what it gives as used."""

    def used_bytes(self) -> int:
        return 0

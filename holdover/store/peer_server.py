"""Gives peers what this engine's tiers keep: to those with the secret, and only what they can name."""

import logging
import threading
from collections.abc import Sequence

import msgspec
import torch
import zmq
from zmq.auth.thread import ThreadAuthenticator

from holdover.errors import HoldoverError, TierError
from holdover.state.segment import DamagedSegment
from holdover.store.peer_protocol import (
    ABSENT,
    FAILED,
    MOST_REQUEST_BYTES,
    NOT_UNDERSTOOD,
    OK,
    PROTOCOL,
    Answer,
    Ask,
    key_pair,
    listening_address,
    require_curve,
)
from holdover.store.tier import Tier

log = logging.getLogger(__name__)
THREADS = 4
SEND_SECONDS = 60.0  # a peer that takes longer to take a segment may get it cut off


class _OnlyPeers:
    """Lets in whose public key follows from the secret."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class PeerServer:
    """Listens from its making until it is closed. given: segments, and bytes, that peers were given; refused: asked for
    in a way that is none.

    Raises HoldoverError if the address can't be had.
    """

    def __init__(self, address: str, secret: str, tiers: Sequence[Tier]) -> None:
        require_curve()
        url = listening_address(address)
        self._tiers = list(tiers)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        asking, _ = key_pair(secret, "client")
        self._authenticator.configure_curve_callback(credentials_provider=_OnlyPeers(asking))
        front = self._context.socket(zmq.ROUTER)
        front.curve_server = True
        front.curve_publickey, front.curve_secretkey = key_pair(secret, "server")
        front.setsockopt(zmq.MAXMSGSIZE, MOST_REQUEST_BYTES)
        front.setsockopt(zmq.LINGER, 0)
        front.setsockopt(zmq.IPV6, "[" in address)
        try:
            front.bind(url)
        except zmq.ZMQError as error:
            front.close()
            self._authenticator.stop()
            self._context.term()
            raise HoldoverError(
                f"--peer-listen {address} can't be had ({zmq.strerror(error.errno or 0)}). Choose another address or "
                "port, or stop what listens there."
            ) from None
        self.address = front.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        back = self._context.socket(zmq.DEALER)
        back.bind("inproc://work")
        self._lock = threading.Lock()
        self.segments_given = self.bytes_given = self.refused = 0
        self._threads = [threading.Thread(target=self._pass_on, args=(front, back), name="holdover-peers", daemon=True)]
        self._threads += [
            threading.Thread(target=self._work, name=f"holdover-peer-{i}", daemon=True) for i in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _pass_on(front: "zmq.Socket[bytes]", back: "zmq.Socket[bytes]") -> None:
        try:
            zmq.proxy(front, back)
        except zmq.ContextTerminated:
            pass
        finally:
            front.close(0)
            back.close(0)

    def _work(self) -> None:
        socket = self._context.socket(zmq.REP)
        try:
            socket.connect("inproc://work")
            while True:
                self._answer(socket, socket.recv_multipart())
        except zmq.ContextTerminated:
            pass
        finally:
            socket.close(0)

    def _answer(self, socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        try:
            (frame,) = frames
            ask = msgspec.msgpack.decode(frame, type=Ask)
        except (ValueError, msgspec.MsgspecError):
            self.refused += 1
            self._say(socket, NOT_UNDERSTOOD)
            return
        if ask.protocol == PROTOCOL and not ask.name:
            self._say(socket, OK)
            return
        if ask.protocol != PROTOCOL or not ask.makes_sense:
            self.refused += 1
            self._say(socket, NOT_UNDERSTOOD)
            return
        try:
            if ask.nbytes is None:
                self._give(socket, ask.name)
            else:
                head = self._head(ask.name, ask.nbytes, ask.parent)
                self._say(socket, ABSENT) if head is None else self._say(socket, OK, head)
        except (TierError, DamagedSegment, ValueError) as error:
            log.warning("a peer can't have %s: %s", ask.name[:80], error)
            self._say(socket, FAILED)
        except zmq.ZMQError:
            raise
        except Exception:  # who asks gets an answer, whatever happens: a socket that has not answered can't go on
            log.exception("giving a segment to a peer failed")
            self._say(socket, FAILED)

    def _head(self, name: str, nbytes: int, parent: str | None) -> bytes | None:
        for tier in self._tiers:
            if tier.has(name) and (head := tier.head(name, nbytes, parent)) is not None:
                return head
        return None

    def _give(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        for tier in self._tiers:
            if not tier.has(name):
                continue
            with tier.get(name) as buffer:  # leased, until the peer has it
                if buffer is not None:
                    self._say(socket, OK, buffer)
                    return
        self._say(socket, ABSENT)

    def _say(self, socket: "zmq.Socket[bytes]", status: str, content: bytes | torch.Tensor | None = None) -> None:
        answer = msgspec.msgpack.encode(Answer(PROTOCOL, status))
        if content is None:
            socket.send(answer)
            return
        data = content.numpy().data if isinstance(content, torch.Tensor) else content
        tracker = socket.send_multipart([answer, data], copy=False, track=True)
        with self._lock:
            self.segments_given += isinstance(content, torch.Tensor)
            self.bytes_given += len(content)
        if isinstance(content, torch.Tensor) and tracker is not None:
            try:
                tracker.wait(SEND_SECONDS)
            except zmq.NotDone:
                log.warning("a peer is slow to take a segment of %d bytes", len(content))

    def counters(self) -> dict[str, float]:
        """Since the start, for reports."""
        return {
            "peer_segments_given": float(self.segments_given),
            "peer_bytes_given": float(self.bytes_given),
            "peer_requests_refused": float(self.refused),
        }

    def close(self) -> None:
        """Stop listening."""
        self._authenticator.stop()
        self._context.term()
        for thread in self._threads:
            thread.join(5)

"""The server's side of the engine: starts its process, sends it requests, hands out what comes back."""

import asyncio
import contextlib
import itertools
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from holdover.config import EngineConfig
from holdover.engine.messages import (
    AskStatistics,
    Cancel,
    Failed,
    FromEngine,
    Generate,
    Output,
    Ready,
    Shutdown,
    StartFailed,
    Statistics,
    ToEngine,
)
from holdover.errors import HoldoverError, RequestError
from holdover.orphans import die_with_parent

ENGINE_MODULE = "holdover.engine.process"
STOP_SECONDS = 3.5
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[FromEngine])


class EngineProcess:
    """One engine in a process of its own. It has no port: only this user's processes can reach its sockets."""

    def __init__(self, config: EngineConfig, module: str = ENGINE_MODULE) -> None:
        self._ready = False
        self._folder = tempfile.TemporaryDirectory(prefix="holdover-")  # mode 0700
        self.to_engine = f"ipc://{self._folder.name}/to-engine"
        self.from_engine = f"ipc://{self._folder.name}/from-engine"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.incoming = self._context.socket(zmq.PULL)
        self.incoming.setsockopt(zmq.RCVHWM, 0)
        self.incoming.bind(self.from_engine)
        self.outgoing = self._context.socket(zmq.PUSH)
        self.outgoing.setsockopt(zmq.SNDHWM, 0)
        self.outgoing.bind(self.to_engine)
        config = msgspec.structs.replace(config, to_engine=self.to_engine, from_engine=self.from_engine)
        # A session of its own: Ctrl-C reaches the server only. Its standard input closes when this process ends.
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,  # until it can watch its standard input
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(config) + b"\n")
        self.process.stdin.flush()

    def wait_ready(self) -> Ready:
        """Block until the engine serves. Raises HoldoverError if it can't."""
        while not self.incoming.poll(100):
            if self.process.poll() is not None and not self.incoming.poll(200):
                raise HoldoverError(f"the engine ended while starting (exit code {self.process.returncode}).")
        message = _decoder.decode(self.incoming.recv())[0]
        if isinstance(message, StartFailed):
            raise HoldoverError(message.message)
        assert isinstance(message, Ready)
        self._ready = True
        self._folder.cleanup()  # both sockets are connected: their names are needed no more, so no kill can leave them
        return message

    def stop(self) -> None:
        """End the process, gently first; at once if it has nothing to save yet. Leaves nothing behind."""
        if not self._ready:
            self.process.kill()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()  # the engine takes that as the end
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._context.destroy(linger=0)
        self._folder.cleanup()


class EngineClient:
    """Requests to a running engine. One per server process; used from its event loop only."""

    def __init__(self, engine: EngineProcess, ready: Ready) -> None:
        self.ready = ready
        self._engine = engine
        self._ids = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[Output | Failed | None]] = {}
        self._statistics: dict[int, asyncio.Future[Statistics]] = {}
        self.failure: str | None = None

    async def __aenter__(self) -> Self:
        self._outgoing = zmq.asyncio.Socket.from_socket(self._engine.outgoing)
        self._incoming = zmq.asyncio.Socket.from_socket(self._engine.incoming)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(RequestError):
            await self._send(Shutdown())

    async def _send(self, message: ToEngine) -> None:
        """Raises RequestError if there is no engine any more: waiting for one would never end."""
        try:
            await self._outgoing.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise RequestError(f"the engine can't be reached ({error})", status=503, code="engine_dead") from None

    async def _receive(self) -> None:
        while True:
            for message in _decoder.decode(await self._incoming.recv()):
                if isinstance(message, Output | Failed):
                    stream = self._streams.get(message.id)
                    if stream is not None:
                        stream.put_nowait(message)
                elif isinstance(message, Statistics):
                    waiter = self._statistics.pop(message.id, None)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(message)

    async def _watch(self) -> None:
        """An engine that has died must not leave requests hanging."""
        while self._engine.process.poll() is None:
            await asyncio.sleep(0.25)
        self.failure = f"the engine has ended (exit code {self._engine.process.returncode}); restart the server"
        for stream in self._streams.values():
            stream.put_nowait(None)

    async def generate(self, request: Generate, choices: int) -> AsyncGenerator[Output, None]:
        """Outputs of a request until all its choices have ended. Leaving the loop early cancels it at once.

        Raises RequestError if the engine refuses it or has died.
        """
        self.check_alive()
        request = msgspec.structs.replace(request, id=next(self._ids))
        stream: asyncio.Queue[Output | Failed | None] = asyncio.Queue()
        self._streams[request.id] = stream
        left = choices
        try:
            await self._send(request)
            while left:
                message = await stream.get()
                if message is None:
                    self.check_alive()
                elif isinstance(message, Failed):
                    left = 0
                    raise RequestError(message.message, status=message.status, code=message.code)
                else:
                    left -= message.finish_reason is not None
                    yield message
        finally:
            del self._streams[request.id]
            if left and self.failure is None:
                with contextlib.suppress(zmq.ZMQError):
                    self._outgoing.send(_encoder.encode(Cancel(request.id)), zmq.NOBLOCK)  # queued at once

    def check_alive(self) -> None:
        if self.failure is not None:
            raise RequestError(self.failure, status=503, code="engine_dead")

    async def statistics(self) -> Statistics:
        """The engine's counters. Raises RequestError if it does not answer within five seconds."""
        self.check_alive()
        number = next(self._ids)
        waiter: asyncio.Future[Statistics] = asyncio.get_running_loop().create_future()
        self._statistics[number] = waiter
        await self._send(AskStatistics(number))
        try:
            return await asyncio.wait_for(waiter, 5.0)
        except TimeoutError:
            self._statistics.pop(number, None)
            raise RequestError("the engine is busy and did not answer in time", status=503) from None

"""A server from its start to its end: bind, start the engine, serve, and leave nothing behind."""

import asyncio
import errno
import gc
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable

import uvicorn

from holdover.config import EngineConfig
from holdover.engine.messages import Ready
from holdover.errors import HoldoverError
from holdover.loop import run_async
from holdover.models.registry import model_folder
from holdover.server.app import Server
from holdover.server.chat import ChatTokenizer
from holdover.server.engine_client import ENGINE_MODULE, EngineClient, EngineProcess

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A listening address. Raises HoldoverError if it can't be had."""
    family = socket.AF_INET
    try:
        if ipaddress.ip_address(host).version == 6:
            family = socket.AF_INET6
    except ValueError:
        pass  # a name
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OverflowError:
        listener.close()
        raise HoldoverError(f"--port {port} is no port; use 0 to 65535.") from None
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise HoldoverError(
                f"{host}:{port} is in use. Stop what listens there, or choose another with --port."
            ) from None
        raise HoldoverError(f"can't listen on {host}:{port}: {error.strerror or error}.") from None
    return listener


def serve(
    config: EngineConfig,
    *,
    host: str,
    port: int,
    model_name: str,
    announce: Callable[[Ready, str], None],
    engine_module: str = ENGINE_MODULE,
) -> int:
    """Serve until SIGINT or SIGTERM. `announce` is told the facts and the URL once requests are taken.

    Returns the exit code. Raises HoldoverError if serving can't begin.
    """
    listener = bind(host, port)
    url = f"http://{host}:{listener.getsockname()[1]}"
    engine = EngineProcess(config, engine_module)
    previous = signal.signal(signal.SIGTERM, _interrupt)  # while starting; uvicorn takes over afterwards
    try:
        tokenizer = ChatTokenizer(model_folder(config.model))
        ready = engine.wait_ready()
        signal.signal(signal.SIGTERM, previous)
        return run_async(_run(engine, ready, Server(model_name, tokenizer), listener, lambda: announce(ready, url)))
    except KeyboardInterrupt:
        return 130
    finally:
        listener.close()
        engine.stop()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


async def _run(
    engine: EngineProcess, ready: Ready, server: Server, listener: socket.socket, announce: Callable[[], None]
) -> int:
    settings = uvicorn.Config(
        server.app(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,
    )
    http = uvicorn.Server(settings)
    async with EngineClient(engine, ready) as client:
        server.engine = client
        gc.freeze()  # what is loaded by now stays: collections need not walk it
        announce()

        async def end_with_engine() -> None:
            while client.failure is None:
                await asyncio.sleep(0.25)
            await asyncio.sleep(1.0)  # let waiting requests hear of it
            http.should_exit = True

        watcher = asyncio.create_task(end_with_engine())
        await http.serve(sockets=[listener])
        watcher.cancel()
        if client.failure is not None:
            raise HoldoverError(f"{client.failure}.")
        return 0

"""A server of one of the demo's modes: `python -m holdover.demo.server_process`, settings as JSON on standard input.

It is the product's own server; only the engine's module differs for the mode that is there for comparison.
"""

import json
import os
import sys
import threading

import msgspec

from holdover.config import EngineConfig
from holdover.engine.messages import Ready
from holdover.errors import HoldoverError
from holdover.server.engine_client import ENGINE_MODULE
from holdover.server.serve import serve

RESAVE_MODULE = "holdover.demo.resave_engine"


class Settings(msgspec.Struct):
    """What the demo tells a server."""

    config: EngineConfig
    resave: bool = False


def _announce(ready: Ready, url: str) -> None:
    sys.stdout.write(json.dumps({"url": url, "vocab_size": ready.vocab_size}) + "\n")
    sys.stdout.flush()


def _watch_parent() -> None:
    """A demo that dies, however it dies, takes its servers with it."""
    while sys.stdin.buffer.read(1):
        pass
    os.kill(os.getpid(), 15)


def main() -> int:
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    threading.Thread(target=_watch_parent, daemon=True).start()
    module = RESAVE_MODULE if settings.resave else ENGINE_MODULE
    try:
        return serve(
            settings.config, host="127.0.0.1", port=0, model_name="demo", announce=_announce, engine_module=module
        )
    except HoldoverError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())

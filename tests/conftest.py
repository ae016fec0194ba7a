"""Shared fixtures. Everything that tests make lies in folders of their own."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("holdover", deadline=None)  # a slow machine is no failure
settings.load_profile("holdover")

# A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiled kernels and the demo's model: made once a run, in a folder that goes with it.
_cache = tempfile.TemporaryDirectory(prefix="holdover-tests-")
os.environ["HOLDOVER_CACHE"] = _cache.name

from holdover.demo.model import demo_model  # noqa: E402
from holdover.models.base import Model  # noqa: E402
from holdover.models.registry import load_model  # noqa: E402
from tests.checkpoints import save_checkpoint  # noqa: E402
from tests.server.running import RunningServer  # noqa: E402


@pytest.fixture(scope="session", params=["kimi_linear", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A small model of each type, in float32."""
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, request.param)
    return load_model(folder, "float32")


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A small hybrid model, in float32."""
    folder = tmp_path_factory.mktemp("hybrid")
    save_checkpoint(folder, "kimi_linear", seed=1)
    return load_model(folder, "float32")


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo's model: it has a tokenizer and a chat template."""
    return demo_model()


@pytest.fixture(scope="session")
def server(demo_folder: Path) -> Iterator[RunningServer]:
    """A real server in its own processes, over the demo's model in float32."""
    with RunningServer(
        demo_folder, "--dtype", "float32", "--device-memory", "64MiB", "--memory-tier", "64MiB"
    ) as running:
        yield running

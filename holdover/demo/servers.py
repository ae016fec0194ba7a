"""Starting and stopping the demo's servers, and reading their counters."""

import asyncio
import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from holdover.demo.server_process import Settings
from holdover.errors import HoldoverError
from holdover.orphans import die_with_parent


@dataclass(frozen=True, slots=True)
class Counts:
    """A server's counters at one moment. Of tiers: summed, but for max_copies."""

    prompt_tokens_computed: float
    bytes_saved: float
    bytes_new_state: float
    max_copies: int
    device_peak_bytes: int

    def since(self, before: "Counts") -> "Counts":
        """What was counted after `before`."""
        return Counts(
            self.prompt_tokens_computed - before.prompt_tokens_computed,
            self.bytes_saved - before.bytes_saved,
            self.bytes_new_state - before.bytes_new_state,
            self.max_copies,
            self.device_peak_bytes,
        )


class DemoServer:
    """One server in processes of its own, from `start` until the context ends."""

    def __init__(self, settings: Settings) -> None:
        self.url = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdover.demo.server_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the demo's to handle
            preexec_fn=die_with_parent,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self._process.stdin.flush()

    def wait_ready(self) -> None:
        """Raises HoldoverError if the server can't start."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the demo's server ended while starting"}
        if "error" in answer:
            raise HoldoverError(answer["error"])
        self.url = answer["url"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ask_to_end()
        try:
            self._process.wait(2.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask_to_end(self) -> None:
        """Tell the server to end; several can be told before any is waited for."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    async def counts(self) -> Counts:
        """The server's counters now, from its /metrics."""
        async with aiohttp.ClientSession() as client, client.get(f"{self.url}/metrics") as answer:
            return parse_counts(await answer.text())

    async def settled(self) -> Counts:
        """Counters once no save is under way."""
        while True:
            async with aiohttp.ClientSession() as client, client.get(f"{self.url}/metrics") as answer:
                text = await answer.text()
            if "holdover_saves_under_way 0.0" in text:
                return parse_counts(text)
            await asyncio.sleep(0.05)


def parse_counts(text: str) -> Counts:
    """Counts from Prometheus text."""
    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(sample.value)

    def total(name: str) -> float:
        return sum(values.get(name, [0.0]))

    return Counts(
        prompt_tokens_computed=total("holdover_prompt_tokens_computed_total"),
        bytes_saved=total("holdover_tier_bytes_saved_total"),
        bytes_new_state=total("holdover_tier_bytes_new_state_total"),
        max_copies=int(max(values.get("holdover_tier_max_copies", [0.0]))),
        device_peak_bytes=int(total("holdover_device_peak_bytes")),
    )

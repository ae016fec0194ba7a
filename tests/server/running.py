"""Real `holdover serve` processes for tests."""

import atexit
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import msgspec


class RunningServer:
    """A server started through the command line, on a free port, from `with` to its end."""

    def __init__(self, model: Path | str, *options: str, environment: dict[str, str] | None = None) -> None:
        command = [
            sys.executable,
            "-m",
            "holdover",
            "serve",
            str(model),
            "--port",
            "0",
            "--served-model-name",
            "tested",
        ]
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=None if environment is None else {**os.environ, **environment},
        )  # fmt: skip
        atexit.register(self.process.kill)  # a test that fails half-way leaves nothing running
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if " at http" in line:
                self.url = line.rstrip().rpartition(" at ")[2].removesuffix("/v1")
            if line.startswith("  tiers:"):
                break
        else:
            raise AssertionError(f"the server did not start: {self.lines}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        if kind is not None:  # pytest shows it with the failure
            print(*self.lines, sep="\n")

    def stop(self, how: int = signal.SIGINT) -> float:
        """End it; returns the seconds that took."""
        begin = time.monotonic()
        if self.process.poll() is None:
            os.kill(self.process.pid, how)
            self.process.wait(20)
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return time.monotonic() - begin

    def children(self) -> list[int]:
        """Process ids of the server's engine and whatever else it started."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def post(self, route: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of a request; `body` bytes are sent as they are."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        request = urllib.request.Request(self.url + route, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, msgspec.json.decode(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, msgspec.json.decode(error.read())

    def get(self, route: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + route, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """A metric without labels, or the sum over its labels."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if line.partition("{")[0].split(" ")[0] == name]
        assert lines, f"no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def wait_for(self, name: str, value: float, seconds: float = 10.0) -> None:
        """Until a metric has a value."""
        deadline = time.monotonic() + seconds
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}, after {seconds} s"
            time.sleep(0.05)

"""A real S3 server (moto's, over HTTP) for tests."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time

import aiohttp
import boto3
from aiohttp import web
from moto.server import ThreadedMotoServer

BUCKET = "state"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(port: int) -> dict[str, str]:
    """What a client of it needs."""
    return {
        "AWS_ACCESS_KEY_ID": "tested", "AWS_SECRET_ACCESS_KEY": "very-secret", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }  # fmt: skip


def s3_client(port: int):
    given = environment(port)
    return boto3.client(
        "s3", region_name="us-east-1", endpoint_url=given["AWS_ENDPOINT_URL"],
        aws_access_key_id=given["AWS_ACCESS_KEY_ID"], aws_secret_access_key=given["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip


class S3:
    """A server that can be stopped and started again on its port, with what it kept."""

    def __init__(self) -> None:
        self.port = free_port()
        self.environment = environment(self.port)
        self.start()
        s3_client(self.port).create_bucket(Bucket=BUCKET)

    def start(self) -> None:
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self.server.start()

    def stop(self) -> None:
        self.server.stop()


class HangingS3:
    """A server that can be made to take connections and say nothing."""

    def __init__(self) -> None:
        self.port = free_port()
        self.environment = environment(self.port)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        s3_client(self.port).create_bucket(Bucket=BUCKET)

    def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)


class FaultyS3:
    """A server behind a proxy that refuses, or takes its time. refuse: the status that every request gets, if not 0;
    delay: seconds before each is passed on. refused, passed: how many there were."""

    def __init__(self) -> None:
        self.inner = S3()
        self.port = free_port()
        self.environment = environment(self.port)
        self.refuse, self.delay = 0, 0.0
        self.refused = self.passed = 0
        self._asleep = self.slept_at_once = 0  # requests that wait, and the most that did so together
        self.authorizations: set[str] = set()  # that came with requests
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(30)

    def _run(self, started: threading.Event) -> None:
        async def serve() -> None:
            self._client = aiohttp.ClientSession(auto_decompress=False)
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", self._pass_on)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            started.set()

        self._loop.run_until_complete(serve())
        self._loop.run_forever()

    def _translated(self, request: web.Request) -> dict[str, str]:
        """The headers with which a request is passed on."""
        return {key: value for key, value in request.headers.items() if key.lower() != "content-length"}

    async def _pass_on(self, request: web.Request) -> web.Response:
        self.authorizations.add(request.headers.get("Authorization", ""))
        if self.refuse:
            self.refused += 1
            return web.Response(status=self.refuse, text="<Error><Code>SlowDown</Code></Error>")
        self._asleep += 1
        self.slept_at_once = max(self.slept_at_once, self._asleep if self.delay else 0)
        await asyncio.sleep(self.delay)
        self._asleep -= 1
        self.passed += 1
        url = f"http://127.0.0.1:{self.inner.port}{request.raw_path}"
        headers = self._translated(request)
        async with self._client.request(request.method, url, headers=headers, data=await request.read()) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in ("transfer-encoding", "content-length")}
            return web.Response(status=answer.status, headers=kept, body=await answer.read())

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self.inner.stop()

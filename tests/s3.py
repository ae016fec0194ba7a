"""A real S3 server (moto's, over HTTP) for tests."""

import signal
import socket
import subprocess
import sys
import time

import boto3
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

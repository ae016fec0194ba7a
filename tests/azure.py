"""A real Azure blob server (Microsoft's Azurite, from npm) for tests: `make azurite` installs it."""

import base64
import hashlib
import hmac
import subprocess
import time
import urllib.request
from email.utils import formatdate
from pathlib import Path

from tests.s3 import free_port

ACCOUNT = "devstoreaccount1"  # Azurite's own, and its key: both are public
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
MAIN = "node_modules/azurite/dist/src/blob/main.js"
CONTAINER = "state"


class Azurite:
    """Runs until it is closed. installed: the folder in which npm has installed it."""

    def __init__(self, installed: Path, data: Path) -> None:
        self.port = free_port()
        self.process = subprocess.Popen(
            ["node", str(installed / MAIN), "--silent", "--disableTelemetry", "--skipApiVersionCheck",
             "--location", str(data), "--blobHost", "127.0.0.1", "--blobPort", str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{self.port}/{ACCOUNT}",
        }  # fmt: skip
        deadline = time.monotonic() + 60
        while True:
            try:
                self._make_container()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.2)

    def _make_container(self) -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        signed = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in sorted(headers.items()))]
        text = "\n".join([*signed, f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}", "restype:container"])
        signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{ACCOUNT}/{CONTAINER}?restype=container", method="PUT",
            headers={**headers, "Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"},
        )  # fmt: skip
        urllib.request.urlopen(request, timeout=5).close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)

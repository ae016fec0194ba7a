"""A server that speaks what `gs://` needs of Google's XML API: moto's S3, behind a translation of the one header in
which the two differ for us, the condition that an object must not be there yet.

No emulator of GCS on PyPI or npm speaks the XML API (list, delete, conditions) that obstore uses.
"""

import json
from pathlib import Path

from aiohttp import web

from tests.s3 import FaultyS3

CONDITION = "x-goog-if-generation-match"
SIGNED = "AWS4-HMAC-SHA256 Credential=tested/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


class GCS(FaultyS3):
    """Over HTTP, with no credentials; `conditions` counts writes that were made only if nothing was there."""

    def __init__(self, folder: Path) -> None:
        self.conditions = 0
        super().__init__()
        account = folder / "account.json"
        account.write_text(
            json.dumps(
                {
                    "gcs_base_url": f"http://127.0.0.1:{self.port}", "disable_oauth": True, "client_email": "",
                    "private_key": "", "private_key_id": "",
                }
            )
        )  # fmt: skip
        self.environment = {"GOOGLE_SERVICE_ACCOUNT": str(account)}

    def _translated(self, request: web.Request) -> dict[str, str]:
        headers = super()._translated(request)
        headers["Authorization"] = SIGNED  # in place of a token
        for key in list(headers):
            if key.lower() == CONDITION:
                assert headers.pop(key) == "0"
                headers["If-None-Match"] = "*"
                self.conditions += 1
        return headers

"""Secrets of 256 bits that the user gives in a file or the environment. They are never shown, logged or stored."""

import re
from pathlib import Path

from holdover.errors import HoldoverError

KEY_DIGITS = re.compile("[0-9a-fA-F]{64}")
NO_SECRET = (
    "peers need a secret that all of them share: --peer-secret-file or HOLDOVER_PEER_SECRET. Make one with: "
    "openssl rand -hex 32"
)
ENCRYPTION_KEY, PEER_SECRET = "encryption key", "peer secret"
VARIABLES = {ENCRYPTION_KEY: "HOLDOVER_ENCRYPTION_KEY", PEER_SECRET: "HOLDOVER_PEER_SECRET"}


def parse_key(text: str, source: str, what: str = ENCRYPTION_KEY) -> str:
    """A key of 256 bits as 64 hexadecimal digits. Raises HoldoverError, which names where it came from, never what it
    is."""
    if not KEY_DIGITS.fullmatch(text.strip()):
        raise HoldoverError(
            f"the {what} in {source} must be 64 hexadecimal digits; make one with: openssl rand -hex 32"
        )
    return text.strip().lower()


def read_key(file: Path | None, environment: str | None, what: str = ENCRYPTION_KEY) -> str | None:
    """The key from a file or the environment (`VARIABLES`), if one is given. Raises HoldoverError."""
    if file is None:
        return None if environment is None else parse_key(environment, VARIABLES[what], what)
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise HoldoverError(f"the {what} file {file} can't be read ({reason}).") from None
    return parse_key(text, str(file), what)

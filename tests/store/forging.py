"""Segments with a checksum that holds, and something else that doesn't."""

from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from holdover.state.segment import NO_CHECKSUM, parse_header


def forge_tokens(folder: Path) -> str:
    """Change a token id in a leaf rows segment of a folder, and seal it again. Returns its name."""
    files = {file: parse_header(file.read_bytes()) for file in (folder / "segments").rglob("*.rows")}
    parents = {header.parent_name for header, _, _, _ in files.values()}
    file, (header, _, start, checksum) = next(item for item in files.items() if item[1][0].name not in parents)
    content = bytearray(file.read_bytes())
    ids = np.frombuffer(content, dtype="<u4", count=1, offset=start + 4)
    ids[0] ^= 1
    blank = bytes(content).replace(checksum.encode(), NO_CHECKSUM.encode(), 1)
    file.write_bytes(bytes(content).replace(checksum.encode(), xxh3_128(blank).hexdigest().encode(), 1))
    return header.name

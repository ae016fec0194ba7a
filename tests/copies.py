"""How often prefix positions lie in a folder, by what the files themselves say."""

from collections import Counter
from pathlib import Path

import numpy as np

from holdover.state.segment import parse_header
from holdover.store.audit import position_digests


def copies(folder: Path) -> Counter[tuple[int, str]]:
    """By position (its prefix's digest, and whose and what it is): segments of rows or windows that hold it."""
    headers = {}
    for file in [*folder.rglob("*.rows"), *folder.rglob("*.window")]:
        content = file.read_bytes()
        header, _, data_start, _ = parse_header(content)
        ids = np.frombuffer(content[data_start : data_start + 4 * (header.end - header.start)], dtype="<u4")
        headers[header.name] = (header, ids)

    def prefix(name: str) -> np.ndarray:
        header, ids = headers[name]
        before = prefix(header.parent_name)[: header.start] if header.parent_name else ids[:0]
        return np.concatenate([before, ids])

    counts: Counter[tuple[int, str]] = Counter()
    for name, (header, _) in headers.items():
        whose = f"{header.kind.value} of {header.space.hex()}"
        counts.update((digest, whose) for digest in position_digests(prefix(name), header.start))
    return counts

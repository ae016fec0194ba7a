"""Makes holdover/demo/data/weka-sessions.jsonl.xz and tau-bench-airline.jsonl.xz from the public traces.

    python tools/select_demo_sessions.py TRACES_FOLDER

The WEKA sessions are the first 96, in the order of their ids, that have at least 24 requests of their own (sub-agents
not counted) of which none is longer than 3,000 blocks (192,000 tokens) and none was answered with more than 2,500
tokens: one answer of many thousand tokens, made one after the other, would outlast everything else in a short run. Of
each, the first 24 requests are kept, with the fields that a replay reads. tau-bench is taken as it is.
"""

import io
import json
import lzma
import sys
import tarfile
from pathlib import Path

SESSIONS, TURNS, MOST_BLOCKS, MOST_OUTPUT = 96, 24, 3000, 2500
KEEP_SESSION = ("id", "block_size", "hash_id_scope", "tool_tokens", "system_tokens")
KEEP_REQUEST = ("t", "in", "out", "hash_ids", "think_time", "api_time")
DATA = Path(__file__).parent.parent / "holdover" / "demo" / "data"


def main(folder: Path) -> None:
    chosen = []
    with tarfile.open(folder / "weka-claude-code.tar.xz") as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if not member.name.endswith(".json") or len(chosen) == SESSIONS:
                continue
            content = archive.extractfile(member)
            assert content is not None
            session = json.load(content)
            requests = [request for request in session["requests"] if request.get("hash_ids")][:TURNS]
            if len(requests) < TURNS or max(len(request["hash_ids"]) for request in requests) > MOST_BLOCKS:
                continue
            if max(request["out"] for request in requests) > MOST_OUTPUT:
                continue
            kept = {key: session[key] for key in KEEP_SESSION}
            kept["requests"] = [{key: request[key] for key in KEEP_REQUEST if key in request} for request in requests]
            chosen.append(kept)
    lines = io.StringIO()
    for session in chosen:
        lines.write(json.dumps(session, separators=(",", ":")) + "\n")
    DATA.mkdir(parents=True, exist_ok=True)
    (DATA / "weka-sessions.jsonl.xz").write_bytes(lzma.compress(lines.getvalue().encode(), preset=9))
    name = "tau-bench-airline.jsonl.xz"
    (DATA / name).write_bytes((folder / name).read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

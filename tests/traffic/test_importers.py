"""Recorded traffic is read as it is, and what is no trace is refused."""

import gzip
import io
import json
import lzma
import tarfile
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.errors import TraceError
from holdover.traffic.importers import BlockTokens, load_trace

BLOCKS = BlockTokens(vocab_size=8192, shrink=16)
DATA = Path(str(files("holdover.demo").joinpath("data")))


def weka(identity: str = "s", tools: int = 128, system: int = 64) -> dict[str, object]:
    def request(ids: list[int], out: int, think: float) -> dict[str, object]:
        return {"t": 0.0, "in": 64 * len(ids) + 9, "out": out, "hash_ids": ids, "think_time": think}

    sub = {"agent_id": "a", "requests": [request([50, 51], 32, 0.0)]}
    requests = [request([1, 2, 3, 4], 160, 0.0), sub, request([1, 2, 3, 4, 5], 1, 8.0)]
    return {"id": identity, "block_size": 64, "tool_tokens": tools, "system_tokens": system, "requests": requests}


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_weka_blocks_become_the_same_tokens_everywhere(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", (json.dumps(weka("a")) + "\n" + json.dumps(weka("b"))).encode())
    a, b = load_trace(path, BLOCKS)
    assert [len(turn.token_ids or ()) for turn in a.turns] == [16, 8, 20]
    assert [turn.output_tokens for turn in a.turns] == [10, 2, 1]
    assert [turn.think_seconds for turn in a.turns] == [0.0, 0.0, 8.0]
    first, second = a.turns[0].token_ids or (), a.turns[2].token_ids or ()
    assert second[:16] == first, "the same block is always the same tokens"
    other = b.turns[0].token_ids or ()
    assert other[:12] == first[:12], "tools and system prompt are equal across sessions"
    assert other[12:] != first[12:], "what is a session's own is its own"
    assert all(256 <= token < 8192 for token in first)


def test_sessions_with_unlike_tools_share_what_is_equal(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", (json.dumps(weka("a", 128)) + "\n" + json.dumps(weka("b", 64))).encode())
    a, b = (session.turns[0].token_ids or () for session in load_trace(path, BLOCKS))
    assert a[:4] == b[:4]
    assert a[4:8] != b[4:8]


@pytest.mark.parametrize("kind", ["json", "json.gz", "json.xz", "tar.xz"])
def test_files_are_read_however_they_are_packed(tmp_path: Path, kind: str) -> None:
    content = json.dumps(weka()).encode()
    if kind == "tar.xz":
        memory = io.BytesIO()
        with tarfile.open(fileobj=memory, mode="w:xz") as archive:
            member = tarfile.TarInfo("folder/x.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        content = memory.getvalue()
    else:
        content = {"json": bytes, "json.gz": gzip.compress, "json.xz": lzma.compress}[kind](content)
    assert len(load_trace(write(tmp_path, f"x.{kind}", content), BLOCKS)[0].turns) == 3


def test_the_shipped_sessions() -> None:
    sessions = load_trace(DATA / "weka-sessions.jsonl.xz", BLOCKS)
    assert len(sessions) == 96
    assert all(len(session.turns) == 24 for session in sessions)
    airline = load_trace(DATA / "tau-bench-airline.jsonl.xz", BLOCKS)
    assert len(airline) == 160
    assert sum(len(session.turns) for session in airline) == 1897
    system = (airline[0].turns[0].messages or ())[0]["content"]
    assert len(system) == 6155


def test_swe_agent(tmp_path: Path) -> None:
    history = [
        {"role": role, "content": text}
        for role, text in (("system", "s"), ("user", "u"), ("assistant", "a" * 40), ("user", "o"), ("assistant", "b"))
    ]
    document = {"history": history, "trajectory": [{"execution_time": 2.5}, {"execution_time": 1.0}]}
    session = load_trace(write(tmp_path, "run.traj", json.dumps(document).encode()), BLOCKS)[0]
    assert [len(turn.messages or ()) for turn in session.turns] == [2, 4]
    assert [turn.think_seconds for turn in session.turns] == [0.0, 2.5]
    assert session.turns[0].output_tokens == 10


@pytest.mark.parametrize(
    "content", [b"", b"not json", b"[1, 2]", b"{}", b'{"requests": 3, "block_size": 64}', b'{"messages": [{"content": 1}]}',  # noqa: E501
                b'{"history": "x"}', b'{"requests": [], "block_size": 64}', b'{"requests": [{"hash_ids": ["x"]}], "block_size": 64}', b"\xff\xfe\x00"],  # noqa: E501
)  # fmt: skip
def test_what_is_no_trace_is_refused_clearly(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(TraceError):
        load_trace(write(tmp_path, "x.json", content), BLOCKS)


def test_a_missing_file_and_a_broken_archive(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace file"):
        load_trace(tmp_path / "absent.json", BLOCKS)
    with pytest.raises(TraceError, match="can't be read"):
        load_trace(write(tmp_path, "x.tar.xz", b"no archive"), BLOCKS)
    with pytest.raises(TraceError, match="shrink"):
        BlockTokens(8192, shrink=3)


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_trace_never_crashes_the_reader(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(json.dumps(weka()).encode())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_bytes(bytes(content))
    try:
        load_trace(path, BLOCKS)
    except TraceError:
        pass

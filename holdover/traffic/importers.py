"""Readers of recorded traffic: WEKA (block hash ids), tau-bench and SWE-agent (full text). Read from the file as it is:
plain, .gz, .xz, or inside a .tar archive, nothing unpacked to disk."""

import gzip
import json
import lzma
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from holdover.errors import TraceError
from holdover.traffic.trace import Session, Turn

BLOCK_TOKENS = 64  # of WEKA
CHARACTERS_PER_TOKEN = 4  # to guess the length of recorded text responses
MAX_DOCUMENT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class BlockTokens:
    """Turns block ids into token ids: the same block is always the same tokens.

    shrink: tokens and outputs are divided by this factor: 64 by a whole number, such as 1, 12.8, 16 or 64. vocab_size:
    ids are drawn from below it; the lowest `reserved` ids, where special tokens lie, are not used.
    """

    vocab_size: int
    shrink: float = 1
    reserved: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.shrink <= BLOCK_TOKENS or abs(BLOCK_TOKENS / self.shrink - self.tokens_per_block) > 1e-6:
            raise TraceError(
                f"--shrink {self.shrink:g} does not fit: a block of {BLOCK_TOKENS} tokens must become a whole "
                f"number of them, so use {BLOCK_TOKENS} divided by 1 to {BLOCK_TOKENS}: 2, 4, 12.8, 16, 32, ..."
            )
        if self.vocab_size <= 2 * self.reserved:
            object.__setattr__(self, "reserved", 0)

    @property
    def tokens_per_block(self) -> int:
        return round(BLOCK_TOKENS / self.shrink)

    def of(self, name: str) -> list[int]:
        """Token ids of the block of this name."""
        raw = blake3(name.encode()).digest(length=8 * self.tokens_per_block)
        words = np.frombuffer(raw, dtype="<u8") % np.uint64(self.vocab_size - self.reserved)
        ids: list[int] = (words + np.uint64(self.reserved)).tolist()
        return ids


def load_trace(path: Path, blocks: BlockTokens, limit: int | None = None) -> list[Session]:
    """Sessions of a file, at most `limit`. Raises TraceError if it is no trace that this version reads."""
    sessions: list[Session] = []
    try:
        for name, document in _documents(path):
            sessions += _sessions(name, document, blocks)
            if limit is not None and len(sessions) >= limit:
                break
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise TraceError(f"the trace {path} can't be read: {error}.") from None
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise TraceError(f"{path} is no trace: it isn't JSON ({error}).") from None
    sessions = [session for session in sessions if session.turns]
    if not sessions:
        raise TraceError(f"{path} holds no session with a turn in it.")
    return sessions[:limit]


def _documents(path: Path) -> Iterator[tuple[str, Any]]:
    """JSON documents of a file, one a file, a line, or a member of an archive."""
    if not path.is_file():
        raise TraceError(f"there is no trace file {path}.")
    if ".tar" in path.suffixes or path.suffix in (".tgz", ".txz"):
        with tarfile.open(path) as archive:
            for member in sorted(archive.getmembers(), key=lambda member: member.name):
                if not member.isfile() or not member.name.endswith((".json", ".jsonl", ".traj")):
                    continue
                if member.size > MAX_DOCUMENT_BYTES:
                    raise TraceError(f"{path}: {member.name} is larger than {MAX_DOCUMENT_BYTES >> 20} MiB.")
                content = archive.extractfile(member)
                assert content is not None
                yield from _split(member.name, content.read().decode())
        return
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "rb") as file:
        content = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise TraceError(f"{path} unpacks to more than {MAX_DOCUMENT_BYTES >> 20} MiB; split it.")
    yield from _split(path.name.removesuffix(".gz").removesuffix(".xz"), content.decode())


def _split(name: str, text: str) -> Iterator[tuple[str, Any]]:
    if not name.endswith(".jsonl"):
        yield name, json.loads(text)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{name}:{number}", json.loads(line)


def _sessions(name: str, document: Any, blocks: BlockTokens) -> list[Session]:
    """Finds out by itself what kind of record a document is."""
    if not isinstance(document, dict):
        raise TraceError(f"{name} is no session: a JSON object is expected.")
    try:
        if "requests" in document and "block_size" in document:
            return [_weka(name, document, blocks)]
        if "history" in document:
            return [_swe_agent(name, document)]
        if "messages" in document:
            return [_tau_bench(name, document)]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise TraceError(f"{name} is damaged: {type(error).__name__} {error}.") from None
    raise TraceError(
        f"{name} is of no kind that is known: WEKA has requests and block_size, SWE-agent history, tau-bench messages."
    )


# WEKA


def _weka(name: str, document: dict[str, Any], blocks: BlockTokens) -> Session:
    if int(document["block_size"]) != BLOCK_TOKENS:
        raise TraceError(f"{name} has blocks of {document['block_size']} tokens; only {BLOCK_TOKENS} are read.")
    session = str(document.get("id", name))
    tool_blocks = int(document.get("tool_tokens", 0)) // BLOCK_TOKENS
    system_blocks = int(document.get("system_tokens", 0)) // BLOCK_TOKENS
    own = [request for request in document["requests"] if "requests" not in request]
    first = own[0]["hash_ids"] if own else []
    # System and tool blocks are equal across sessions of one product, though their ids don't show it.
    names: dict[int, str] = {}
    for i, block in enumerate(first[: tool_blocks + system_blocks]):
        names[int(block)] = f"tool {i}" if i < tool_blocks else f"system {i - tool_blocks}"
    tokens: dict[int, list[int]] = {}

    def prompt(hash_ids: list[int]) -> tuple[int, ...]:
        ids: list[int] = []
        for block in hash_ids:
            known = tokens.get(block)
            if known is None:
                known = tokens[block] = blocks.of(names.get(block, f"{session} {block}"))
            ids += known
        return tuple(ids)

    def turn(request: dict[str, Any]) -> Turn:
        return Turn(
            output_tokens=max(1, round(int(request["out"]) / blocks.shrink)),
            think_seconds=max(0.0, float(request.get("think_time") or 0.0)),
            token_ids=prompt(request["hash_ids"]),
        )

    turns: list[Turn] = []
    for request in document["requests"]:
        # A sub-agent's turns come where its parent spawned it; the parent waits for them.
        for each in request.get("requests", [request]):
            if each.get("hash_ids"):
                turns.append(turn(each))
    return Session(session, tuple(turns))


# Text


def _guess_tokens(message: dict[str, Any]) -> int:
    """Length of a recorded response, at four characters a token."""
    text = message.get("content") or ""
    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
    return max(1, (len(str(text)) + len(calls)) // CHARACTERS_PER_TOKEN)


def _chat_turns(messages: list[dict[str, Any]], think_seconds: list[float] | None = None) -> tuple[Turn, ...]:
    """A turn for each response of the assistant: the messages before it, and its length."""
    turns: list[Turn] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i == 0:
            continue
        think = think_seconds[len(turns) - 1] if think_seconds and 0 < len(turns) <= len(think_seconds) else 0.0
        turns.append(Turn(_guess_tokens(message), think, messages=tuple(messages[:i])))
    return tuple(turns)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """What the chat endpoint takes of a recorded message."""
    content = message.get("content")
    kept: dict[str, Any] = {"role": message["role"], "content": content if isinstance(content, str) else ""}
    if isinstance(content, list):
        kept["content"] = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    for field in ("tool_calls", "tool_call_id", "name"):
        if message.get(field) is not None:
            kept[field] = message[field]
    if isinstance(kept.get("tool_call_id"), list):
        kept["tool_call_id"] = kept["tool_call_id"][0]
    return kept


def _tau_bench(name: str, document: dict[str, Any]) -> Session:
    identity = f"tau-bench {document['task_id']}.{document.get('trial', 0)}" if "task_id" in document else name
    return Session(identity, _chat_turns([_message(message) for message in document["messages"]]))


def _swe_agent(name: str, document: dict[str, Any]) -> Session:
    times = [float(step.get("execution_time") or 0.0) for step in document.get("trajectory") or []]
    messages = [_message(message) for message in document["history"] if message.get("role")]
    return Session(Path(name).stem, _chat_turns(messages, times))

"""Replays sessions against an OpenAI-compatible server, in a closed loop: each turn follows the end of the last."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from holdover.errors import TraceError
from holdover.traffic.trace import Session, Turn

READ_TIMEOUT_SECONDS = 600.0


@dataclass(slots=True)
class TurnResult:
    """What one turn took. Times in seconds; `start` counts from the replay's start.

    token_ids: of the response, if asked for. reused: prompt tokens by the place that their state came from, where the
    server says so; computed is None where it doesn't.
    """

    session: str
    turn: int
    start: float
    ttft: float | None = None
    duration: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    computed: int | None = None
    reused: dict[str, int] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay. think_limit: recorded think times (seconds) are cut to this before they are scaled.

    fixed_length: ask for outputs exactly as long as recorded (ignore_eos, min_tokens). token_ids: ask for the outputs'
    ids. session_key: name the session in each request (prompt_cache_key).
    """

    agents: int
    think_scale: float = 1.0
    think_limit: float | None = None
    model: str | None = None
    fixed_length: bool = True
    token_ids: bool = False
    session_key: bool = False
    api_key: str | None = None
    seconds: float | None = None


async def server_model(url: str, api_key: str | None) -> dict[str, Any]:
    """The first model that the server offers. Raises TraceError if there is no such server."""
    try:
        async with aiohttp.ClientSession(headers=_headers(api_key)) as client:
            async with client.get(f"{base_url(url)}/v1/models", timeout=aiohttp.ClientTimeout(10)) as answer:
                body = await answer.json(content_type=None)
                model: dict[str, Any] = body["data"][0]
                return model
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise TraceError(f"no server answers at {url} ({error or type(error).__name__}); start one first.") from None
    except (KeyError, IndexError, TypeError, ValueError):
        raise TraceError(f"{url} is no OpenAI-compatible server: /v1/models has no list of models.") from None


def base_url(url: str) -> str:
    """The server's root, whether the user gave it with or without /v1."""
    if not url.startswith(("http://", "https://")):
        raise TraceError(f"--url {url!r} must begin with http:// or https://.")
    return url.rstrip("/").removesuffix("/v1")


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def replay(
    sessions: Sequence[Session],
    url: str,
    options: ReplayOptions,
    progress: Callable[[TurnResult], None] = lambda _: None,
    results: list[TurnResult] | None = None,
    first_turns: dict[str, int] | None = None,
) -> list[TurnResult]:
    """Run all sessions, `options.agents` at a time; each agent takes the next session when its own has ended.

    `results` is filled as turns end, so that an interrupted replay still has them. `first_turns`: number of each
    session's first turn, if it is a part of a longer one.
    """
    results = [] if results is None else results
    waiting = list(sessions)[::-1]
    begin = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=READ_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=_headers(options.api_key), read_bufsize=1 << 18
    ) as client:

        async def agent() -> None:
            while waiting:
                session = waiting.pop()
                first = (first_turns or {}).get(session.id, 0)
                for number, turn in enumerate(session.turns, first):
                    if options.seconds is not None and time.perf_counter() - begin > options.seconds:
                        return
                    if number > first or first:
                        await asyncio.sleep(think_time(turn, options))
                    result = TurnResult(session.id, number, time.perf_counter() - begin)
                    await _run_turn(client, base_url(url), session, turn, options, result, begin)
                    results.append(result)
                    progress(result)

        await asyncio.gather(*(agent() for _ in range(min(options.agents, len(sessions)))))
    return results


def think_time(turn: Turn, options: ReplayOptions) -> float:
    """Seconds to wait before a turn."""
    recorded = turn.think_seconds
    return options.think_scale * (recorded if options.think_limit is None else min(recorded, options.think_limit))


def request_body(session: Session, turn: Turn, options: ReplayOptions) -> tuple[str, dict[str, Any]]:
    """Route and body of a turn's request."""
    body: dict[str, Any] = {
        "max_tokens": turn.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.model is not None:
        body["model"] = options.model
    if options.fixed_length:
        body |= {"ignore_eos": True, "min_tokens": turn.output_tokens}
    if options.token_ids:
        body["return_token_ids"] = True
    if options.session_key:
        body["prompt_cache_key"] = session.id
    if turn.token_ids is not None:
        return "/v1/completions", {**body, "prompt": turn.token_ids}
    body["messages"] = turn.messages
    if turn.tools:
        body["tools"] = turn.tools
    return "/v1/chat/completions", body


async def _run_turn(
    client: aiohttp.ClientSession,
    url: str,
    session: Session,
    turn: Turn,
    options: ReplayOptions,
    result: TurnResult,
    begin: float,
) -> None:
    route, body = request_body(session, turn, options)
    payload = msgspec.json.encode(body)
    result.start = time.perf_counter() - begin
    sent = time.perf_counter()
    try:
        headers = {"Content-Type": "application/json"}
        async with client.post(url + route, data=payload, headers=headers) as answer:
            if answer.status != 200:
                result.error = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                return
            await _read_stream(answer.content, result, sent)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    finally:
        result.duration = time.perf_counter() - sent


async def _read_stream(content: aiohttp.StreamReader, result: TurnResult, sent: float) -> None:
    """Server-sent events of OpenAI's streams."""
    last = sent
    async for line in content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            if result.ttft is None:
                result.error = "the stream held no token"
            await content.read()  # to the end: a connection that is left early can't be used again
            return
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            result.error = str(chunk["error"].get("message", chunk["error"]))
            return
        for choice in chunk.get("choices", ()):
            if choice.get("finish_reason") is None or choice.get("text") or choice.get("token_ids") or last == sent:
                now = time.perf_counter()
                if result.ttft is None:
                    result.ttft = now - sent
                else:
                    result.gaps.append(now - last)
                last = now
            result.token_ids += choice.get("token_ids") or ()
        if chunk.get("usage"):
            _read_usage(chunk["usage"], result)
    result.error = "the stream broke off before its end"


def _read_usage(usage: dict[str, Any], result: TurnResult) -> None:
    result.prompt_tokens = usage.get("prompt_tokens", 0)
    result.output_tokens = usage.get("completion_tokens", 0)
    result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    own = usage.get("holdover")
    if own:
        result.computed, result.reused = own["computed"], own["reused"]

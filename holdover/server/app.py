"""The HTTP routes."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from holdover import __version__
from holdover.engine.messages import Generate, Output, Usage
from holdover.errors import RequestError
from holdover.server.answers import ChatAnswer, CompletionAnswer
from holdover.server.chat import ChatTokenizer
from holdover.server.engine_client import EngineClient
from holdover.server.metrics import render
from holdover.server.protocol import (
    ChatRequest,
    CompletionRequest,
    decode_request,
    error_body,
    refuse_unsupported,
    sampling_of,
    usage_body,
)

MAX_BODY_BYTES = 64 << 20
MAX_PROMPTS = 256
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
Answer = ChatAnswer | CompletionAnswer


class Server:
    """What the routes share."""

    def __init__(self, model_name: str, tokenizer: ChatTokenizer) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.engine: EngineClient | None = None
        self.created = int(time.time())

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        handlers: Any = {404: _no_route, 405: _wrong_method, RequestError: _request_error, Exception: _server_error}
        return Starlette(routes=routes, exception_handlers=handlers)

    @property
    def _engine(self) -> EngineClient:
        if self.engine is None:
            raise RequestError("the engine is starting.", status=503)
        return self.engine

    # Routes

    async def health(self, _: Request) -> Response:
        self._engine.check_alive()
        return _json({"status": "ok", "version": __version__})

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._model_body()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return _json(self._model_body())

    def _model_body(self) -> dict[str, Any]:
        ready = self._engine.ready
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "holdover",
            "max_model_len": ready.context_length,
            "max_request_tokens": ready.max_request_tokens,
            "vocab_size": ready.vocab_size,
            "bytes_per_token": ready.bytes_per_token,
            "bytes_per_snapshot": ready.bytes_per_snapshot,
        }

    async def metrics(self, _: Request) -> Response:
        return Response(render(await self._engine.statistics()), media_type="text/plain; version=0.0.4")

    async def completions(self, http: Request) -> Response:
        body: CompletionRequest = decode_request(await _body(http), CompletionRequest)
        self._check_model(body.model)
        refuse_unsupported(body)
        prompts = self._prompts(body.prompt)
        wanted = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        requests = [self._request(body, prompt, wanted, ()) for prompt in prompts]
        answer = CompletionAnswer(f"cmpl-{uuid.uuid4().hex}", self.model_name, body, self.tokenizer, prompts)
        return await self._respond(http, body, requests, answer)

    async def chat(self, http: Request) -> Response:
        body: ChatRequest = decode_request(await _body(http), ChatRequest)
        self._check_model(body.model)
        refuse_unsupported(body)
        # Rendering and tokenizing a long history takes a while; other requests' tokens must not wait for it.
        prompt, boundaries = await asyncio.to_thread(
            self.tokenizer.encode_chat, body.messages, body.tools, body.chat_template_kwargs
        )
        limit = self._engine.ready.max_request_tokens - len(prompt)
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        request = self._request(body, prompt, max(1, limit) if asked is None else asked, boundaries)
        answer = ChatAnswer(f"chatcmpl-{uuid.uuid4().hex}", self.model_name, body, self.tokenizer)
        return await self._respond(http, body, [request], answer)

    # Requests

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise RequestError(
                f"the model {name!r} does not exist; this server has {self.model_name!r}.",
                param="model",
                status=404,
                code="model_not_found",
            )

    def _prompts(self, prompt: str | list[str | int | list[int]]) -> list[list[int]]:
        """Token ids of each prompt: one text, one list of ids, or a list of either."""
        if isinstance(prompt, str):
            return [self.tokenizer.encode(prompt)]
        kinds = set(map(type, prompt))
        if len(kinds) > 1:
            raise RequestError("prompt mixes texts, token ids and lists of token ids; use one kind.", param="prompt")
        if kinds <= {int}:
            return [cast(list[int], prompt)]
        if len(prompt) > MAX_PROMPTS:
            raise RequestError(f"at most {MAX_PROMPTS} prompts are supported in one request.", param="prompt")
        return [self.tokenizer.encode(each) if isinstance(each, str) else list(each) for each in prompt
                if not isinstance(each, int)]  # fmt: skip

    def _request(
        self, body: CompletionRequest | ChatRequest, prompt: list[int], max_tokens: int, boundaries: tuple[int, ...]
    ) -> Generate:
        ready = self._engine.ready
        where = "messages" if isinstance(body, ChatRequest) else "prompt"
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token.", param=where)
        try:
            ids = np.asarray(prompt, dtype=np.int64)
        except OverflowError:
            ids = np.array([-1])
        if ids.max() >= ready.vocab_size or ids.min() < 0:
            raise RequestError(f"token ids must be from 0 to {ready.vocab_size - 1}.", param=where)
        if len(prompt) + max_tokens > ready.context_length:
            raise RequestError(
                f"this model's maximum context length is {ready.context_length} tokens; the request asks for "
                f"{len(prompt)} in the prompt and {max_tokens} in the answer. Shorten one of them.",
                param=where,
                code="context_length_exceeded",
            )
        if max_tokens < 1:
            raise RequestError("max_tokens must be at least 1.", param="max_tokens")
        if body.stop and not self.tokenizer.available:
            raise RequestError("stop strings need a tokenizer, which this model lacks; use stop_token_ids.", "stop")
        return Generate(
            id=0,
            prompt=ids.astype("<u4").tobytes(),
            sampling=sampling_of(body, max_tokens),
            n=body.n or 1,
            boundaries=boundaries,
            salt=body.cache_salt or "",
            session=body.prompt_cache_key or body.user,
        )

    async def _respond(
        self, http: Request, body: CompletionRequest | ChatRequest, requests: list[Generate], answer: Answer
    ) -> Response:
        outputs = self._outputs(requests)
        if not body.stream:
            return _json(await _unless_disconnected(http, _collect(outputs, answer)))
        first = await anext(outputs)  # a request that is refused gets an HTTP error, not a broken stream
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        return StreamingResponse(_stream(first, outputs, answer, with_usage), media_type="text/event-stream")

    async def _outputs(self, requests: list[Generate]) -> AsyncGenerator[tuple[int, Output], None]:
        """Outputs of all requests as they come, each with its choice's number. Ends them all if left early."""
        if len(requests) == 1:
            async with contextlib.aclosing(self._engine.generate(requests[0], requests[0].n)) as single:
                async for output in single:
                    yield output.index, output
            return
        merged: asyncio.Queue[tuple[int, Output] | Exception | None] = asyncio.Queue()

        async def pump(number: int, request: Generate) -> None:
            try:
                async for output in self._engine.generate(request, request.n):
                    merged.put_nowait((number * request.n + output.index, output))
                merged.put_nowait(None)
            except Exception as error:
                merged.put_nowait(error)

        tasks = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
        try:
            left = len(tasks)
            while left:
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(outputs: AsyncGenerator[tuple[int, Output], None], answer: Answer) -> dict[str, Any]:
    usages: dict[int, Usage] = {}
    async with contextlib.aclosing(outputs) as all_outputs:
        async for index, output in all_outputs:
            answer.add(index, output)
            if output.usage is not None:
                usages[index] = output.usage
    return {**answer.body(), "usage": usage_body(answer.billed(usages))}


async def _stream(
    first: tuple[int, Output], outputs: AsyncGenerator[tuple[int, Output], None], answer: Answer, with_usage: bool
) -> AsyncIterator[bytes]:
    usages: dict[int, Usage] = {}

    def event(index: int, output: Output) -> bytes:
        if output.usage is not None:
            usages[index] = output.usage
        return b"".join(_event(chunk) for chunk in answer.chunks(index, output, with_usage))

    async with contextlib.aclosing(outputs) as rest:
        try:
            yield event(*first)
            async for index, output in rest:
                yield event(index, output)
        except RequestError as error:
            yield _event(error_body(error))
            return
    if with_usage:
        yield _event(answer.usage_chunk(usage_body(answer.billed(usages))))
    yield b"data: [DONE]\n\n"


async def _unless_disconnected(http: Request, work: Any) -> Any:
    """The result of `work`, which is cancelled as soon as the client goes away."""
    task = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.create_task(watch())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise RequestError("the client has gone.", status=499)
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()


async def _body(http: Request) -> bytes:
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise RequestError(f"the request is larger than {MAX_BODY_BYTES >> 20} MiB.", status=413)
        parts.append(part)
    return b"".join(parts)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _json(error_body(error), error.status)


async def _no_route(http: Request, _: Exception) -> Response:
    message = f"there is no route {http.method} {http.url.path}; see /v1/models, /v1/chat/completions, /v1/completions."
    return _json(error_body(RequestError(message, status=404, code="unknown_url")), 404)


async def _wrong_method(http: Request, _: Exception) -> Response:
    message = f"{http.url.path} does not take {http.method}."
    return _json(error_body(RequestError(message, status=405, code="method_not_allowed")), 405)


async def _server_error(_: Request, error: Exception) -> Response:
    message = f"the server failed ({type(error).__name__}); its log says more."
    return _json(error_body(RequestError(message, status=500)), 500)

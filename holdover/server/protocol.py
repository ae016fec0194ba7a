"""OpenAI's requests and answers, as far as Holdover speaks them. What is unknown or unsupported is refused by name."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdover.engine.messages import Sampling, Usage
from holdover.errors import RequestError

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
NonNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class ResponseFormat(msgspec.Struct):
    type: str = "text"


class _Common(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of request. The last block is Holdover's own or other engines' habit."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: NonNegative | None = None
    user: str | None = None
    logit_bias: dict[str, float] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: NonNegative | None = None
    stop_token_ids: list[NonNegative] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None


class CompletionRequest(_Common, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: Positive | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class ChatRequest(_Common, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]]
    max_completion_tokens: NonNegative | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def decode_request(body: bytes, kind: type[CompletionRequest] | type[ChatRequest]) -> Any:
    """A request from its JSON. Raises RequestError that names the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        place = re.search(r"`\$\.?([^`]*)`", text)
        unknown = re.search(r"unknown field `([^`]*)`", text)
        missing = re.search(r"missing required field `([^`]*)`", text)
        found = unknown or missing or place
        param = found[1] if found else None
        if unknown:
            text = f"unknown argument {param!r}: leave it out"
        raise RequestError(f"{text}.", param=param or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}.") from None


def _refuse(condition: bool, param: str, message: str) -> None:
    if condition:
        raise RequestError(message, param=param)


def refuse_unsupported(request: CompletionRequest | ChatRequest) -> None:
    """Raise RequestError for whatever would change the answer and is not implemented."""
    _refuse(bool(request.logit_bias), "logit_bias", "logit_bias is not supported.")
    if isinstance(request, CompletionRequest):
        _refuse(bool(request.suffix), "suffix", "suffix is not supported.")
        best_of = request.best_of or request.n or 1
        _refuse(best_of != (request.n or 1), "best_of", "best_of is supported only if equal to n.")
        return
    kind = request.response_format.type if request.response_format else "text"
    _refuse(kind != "text", "response_format", f"response_format {kind!r} is not supported; only text is.")
    _refuse(
        request.tool_choice not in (None, "none", "auto"),
        "tool_choice",
        "tool_choice must be none or auto: forced tool calls are not supported.",
    )
    _refuse(
        request.top_logprobs is not None and not request.logprobs, "top_logprobs", "top_logprobs needs logprobs: true."
    )
    _refuse(bool(set(request.modalities or ()) - {"text"}), "modalities", "only the text modality is supported.")


def sampling_of(request: CompletionRequest | ChatRequest, max_tokens: int) -> Sampling:
    """Sampling parameters, defaults filled in. Raises RequestError for values out of bounds."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    _refuse(len(stops) > MAX_STOPS, "stop", f"at most {MAX_STOPS} stop strings are supported.")
    _refuse("" in stops, "stop", "a stop string can't be empty.")
    _refuse((request.min_tokens or 0) > max_tokens, "min_tokens", "min_tokens can't be more than max_tokens.")
    logprobs: int | None
    if isinstance(request, ChatRequest):
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    else:
        logprobs = request.logprobs
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=None if request.top_k in (None, 0, -1) else request.top_k,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        seed=request.seed,
        stop=tuple(stops),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
    )


def usage_body(usages: list[Usage]) -> dict[str, Any]:
    """OpenAI's usage object over the choices of each prompt; `holdover` says from where state was reused."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    reused: dict[str, int] = {}
    for usage in usages:
        for place, tokens in usage.reused.items():
            reused[place] = reused.get(place, 0) + tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "holdover": {"computed": sum(usage.computed for usage in usages), "reused": reused},
    }


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


FinishReason = Literal["stop", "length"]

"""The real `openai` client against the real server."""

import openai
import pytest

from tests.server.running import RunningServer

CHAT = [
    {"role": "system", "content": "You are an airline agent. " * 20},
    {"role": "user", "content": "I want to change my flight from Seattle to Dallas."},
]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tested"]
    assert client.models.retrieve("tested").owned_by == "holdover"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("absent")


def test_completion_of_text_and_of_token_ids(client: openai.OpenAI) -> None:
    text = client.completions.create(
        model="tested", prompt="The flight", max_tokens=6, temperature=0, extra_body={"return_token_ids": True}
    )
    ids = text.choices[0].prompt_token_ids
    same = client.completions.create(model="tested", prompt=ids, max_tokens=6, temperature=0)
    assert same.choices[0].text == text.choices[0].text
    assert text.usage.prompt_tokens == len(ids)
    assert text.usage.completion_tokens == 6
    assert text.choices[0].finish_reason == "length"
    several = client.completions.create(model="tested", prompt=[ids, ids], max_tokens=6, temperature=0, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in several.choices} == {text.choices[0].text}


def test_chat_streamed_equals_chat_whole_and_cached_tokens_are_true(client: openai.OpenAI) -> None:
    options = {"model": "tested", "messages": CHAT, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    prompt_tokens = whole.usage.prompt_tokens
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == prompt_tokens, "the same prompt again"
    assert chunks[-1].usage.completion_tokens == 12
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    other = [CHAT[0], {"role": "user", "content": "Something else entirely."}]
    again = client.chat.completions.create(**{**options, "messages": other})
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached >= 80, "the system prompt's end is a known message boundary: the second agent resumes there"
    assert again.usage.holdover["computed"] == again.usage.prompt_tokens - cached


def test_the_next_turn_reuses_the_whole_history(client: openai.OpenAI) -> None:
    messages = [*CHAT, {"role": "user", "content": "And a window seat."}]
    first = client.chat.completions.create(model="tested", messages=messages, max_tokens=8, temperature=0)
    messages += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thank you."}]
    second = client.chat.completions.create(model="tested", messages=messages, max_tokens=8, temperature=0)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_tools_and_tool_results_are_rendered(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "find_flight", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "find_flight", "arguments": '{"to": "Dallas"}'}}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "HAT123"},
    ]
    answer = client.chat.completions.create(model="tested", messages=messages, tools=[tool], max_tokens=4)
    assert answer.usage.completion_tokens <= 4


def test_seeds_n_and_logprobs(client: openai.OpenAI) -> None:
    options = {"model": "tested", "messages": CHAT, "max_tokens": 6, "seed": 3, "n": 3}
    a, b = (client.chat.completions.create(**options) for _ in range(2))
    texts = [choice.message.content for choice in a.choices]
    assert texts == [choice.message.content for choice in b.choices]
    assert len(set(texts)) > 1
    assert a.usage.completion_tokens == 18
    said = client.chat.completions.create(
        model="tested", messages=CHAT, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    content = said.choices[0].logprobs.content
    assert len(content) == 3
    assert all(each.logprob == pytest.approx(each.top_logprobs[0].logprob) for each in content)
    old = client.completions.create(model="tested", prompt="The", max_tokens=3, temperature=0, logprobs=2)
    assert len(old.choices[0].logprobs.token_logprobs) == 3


def test_stop_strings(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tested", prompt="The flight", max_tokens=30, temperature=0).choices[0].text
    stop = whole[10:14]
    stopped = client.completions.create(model="tested", prompt="The flight", max_tokens=30, temperature=0, stop=stop)
    assert stopped.choices[0].text == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 7}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "messages"),
        ({"presence_penalty": 5}, "presence_penalty"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "ghost", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_bad_parameters_are_refused_by_name(client: openai.OpenAI, change: dict[str, object], param: str) -> None:
    options = {"model": "tested", "messages": CHAT, "max_tokens": 4}
    body = {**options, **change}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body)  # type: ignore[call-overload]
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_longer_than_the_context(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tested", prompt=[5] * 40_000, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="absent", messages=CHAT)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("body", "status"),
    [(b'{"prompt": ', 400), (b"\xff\xfe", 400), (b"[]", 400), (b'{"prompt": [1], "surprise": 1}', 400),
     (b'{"prompt": [1, "a"]}', 400), (b'{"prompt": [99999999]}', 400), (b'{"prompt": [-1]}', 400), (b'{"prompt": []}', 400),  # noqa: E501
     (b"[" * 100_000, 400)],
)  # fmt: skip
def test_broken_bodies_get_openais_error_shape(server: RunningServer, body: bytes, status: int) -> None:
    got, answer = server.post("/v1/completions", body)
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"


def test_unknown_routes_and_methods(server: RunningServer) -> None:
    status, answer = server.post("/v1/nothing", {})
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    status, _ = server.get("/v1/completions")
    assert status == 405


def test_health_and_metrics(server: RunningServer) -> None:
    assert server.get("/health")[0] == 200
    fed = server.metric("holdover_prompt_tokens_computed_total")
    server.post("/v1/completions", {"prompt": [300, 301, 302, 303], "max_tokens": 1, "cache_salt": "metrics"})
    assert server.metric("holdover_prompt_tokens_computed_total") == fed + 4
    server.wait_for("holdover_saves_under_way", 0)
    assert server.metric("holdover_tier_bytes_saved_total") > 0
    assert server.metric("holdover_leases") == 0


def test_another_salt_is_never_served_from_this_ones_state(server: RunningServer) -> None:
    body = {"prompt": list(range(400, 460)), "max_tokens": 1}
    usages = [
        server.post("/v1/completions", {**body, "cache_salt": salt})[1]["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        for salt in ("a", "b", "a")
    ]
    assert usages == [0, 0, 60]

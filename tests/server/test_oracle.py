"""`holdover serve oracle:`: the oracle behind the real server, asked by the real client."""

import random
from pathlib import Path

from openai import OpenAI

from holdover.models.oracle import FOLDER
from holdover.server.chat import ChatTokenizer
from tests.server.running import RunningServer
from tests.simulation.reference import Reference

PROMPT = random.Random(3).choices(range(256), k=300)


def test_its_answers_are_right_with_state_from_device_memory_and_disk(tmp_path: Path) -> None:
    options = [
        "--device-memory",
        "40KiB",
        "--max-running",
        "2",
        "--memory-tier",
        "1MiB",
        "--disk-tier",
        f"{tmp_path}:4MiB",
    ]
    reference = Reference("hybrid", 5)
    history = list(PROMPT)
    for _ in range(2):  # the second time after a restart
        with RunningServer("oracle:hybrid:5", *options) as server:
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
            for length in (100, 250, len(history)):
                answer = client.completions.create(
                    model="tested", prompt=history[:length], max_tokens=8, temperature=0, logprobs=1,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                tokens = reference.answer(history[:length], 8)
                tokenizer = ChatTokenizer(FOLDER)
                assert answer.choices[0].logprobs.tokens == [tokenizer.token_text(token) for token in tokens]
            again = client.completions.create(model="tested", prompt=history, max_tokens=1, temperature=0)
            assert again.usage.prompt_tokens_details.cached_tokens == len(history)


def test_it_chats() -> None:
    messages = [{"role": "system", "content": "Be an oracle."}, {"role": "user", "content": "What is äöü?"}]
    with RunningServer("oracle:dense", "--device-memory", "4MiB", "--memory-tier", "none") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        answer = client.chat.completions.create(model="tested", messages=messages, max_tokens=12, temperature=0)
        ids, boundaries = ChatTokenizer(FOLDER).encode_chat(messages, None, None)
        text = "<|im_start|>system\nBe an oracle.<|im_end|>\n"
        assert (
            bytes(token for token in ids if token < 256)
            .decode()
            .startswith("system\nBe an oracle.\nuser\nWhat is äöü?")
        )
        assert boundaries == (len(ChatTokenizer(FOLDER).encode(text)),)
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.usage.completion_tokens == len(Reference("dense").answer(ids, 12, frozenset([258])))

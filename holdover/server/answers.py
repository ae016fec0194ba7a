"""Answers in OpenAI's shapes, whole or as chunks of a stream."""

import time
from dataclasses import dataclass, field
from typing import Any

from holdover.engine.messages import Output, TokenLogprob, Usage
from holdover.server.chat import ChatTokenizer
from holdover.server.protocol import ChatRequest, CompletionRequest


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    text_length: int = 0
    begun: bool = False


class _Answer:
    """What both kinds share: choices that grow."""

    object_name: str
    chunk_name: str

    def __init__(
        self, answer_id: str, model: str, request: CompletionRequest | ChatRequest, tokenizer: ChatTokenizer
    ) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._choices: dict[int, _Choice] = {}

    def add(self, index: int, output: Output) -> _Choice:
        choice = self._choices.setdefault(index, _Choice())
        choice.text.append(output.text)
        choice.token_ids += output.token_ids
        choice.logprobs += output.logprobs
        choice.finish_reason = output.finish_reason or choice.finish_reason
        return choice

    def billed(self, usages: dict[int, Usage]) -> list[Usage]:
        """Usage by prompt: the choices of one prompt count its tokens once."""
        per_prompt = self.request.n or 1
        billed = []
        for first in range(0, len(usages), per_prompt):
            choices = [usages[i] for i in range(first, first + per_prompt)]
            leader = choices[0]
            billed.append(
                Usage(
                    leader.prompt_tokens,
                    sum(each.completion_tokens for each in choices),
                    leader.cached_tokens,
                    sum(each.computed for each in choices),
                    leader.reused,
                )
            )
        return billed

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_name, "choices": [], "usage": usage}

    def _chunk(self, choice: dict[str, Any], with_usage: bool) -> dict[str, Any]:
        body = {**self._head, "object": self.chunk_name, "choices": [choice]}
        return {**body, "usage": None} if with_usage else body


class CompletionAnswer(_Answer):
    """Of /v1/completions."""

    object_name = chunk_name = "text_completion"

    def __init__(
        self,
        answer_id: str,
        model: str,
        request: CompletionRequest,
        tokenizer: ChatTokenizer,
        prompts: list[list[int]],
    ) -> None:
        super().__init__(answer_id, model, request, tokenizer)
        per_prompt = request.n or 1
        self._echo = [tokenizer.decode(p) if request.echo else "" for p in prompts for _ in range(per_prompt)]
        self._prompts = [p for p in prompts for _ in range(per_prompt)]

    def body(self) -> dict[str, Any]:
        choices = []
        for index in sorted(self._choices):
            choice = self._choices[index]
            body = {
                "index": index,
                "text": self._echo[index] + "".join(choice.text),
                "logprobs": self._logprobs(choice.logprobs, len(self._echo[index])),
                "finish_reason": choice.finish_reason,
            }
            if self.request.return_token_ids:
                body |= {"token_ids": choice.token_ids, "prompt_token_ids": self._prompts[index]}
            choices.append(body)
        return {**self._head, "object": self.object_name, "choices": choices}

    def chunks(self, index: int, output: Output, with_usage: bool) -> list[dict[str, Any]]:
        choice = self._choices.setdefault(index, _Choice())
        text = output.text if choice.begun else self._echo[index] + output.text
        body: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(output.logprobs, choice.text_length),
            "finish_reason": output.finish_reason,
        }
        if self.request.return_token_ids:
            body["token_ids"] = output.token_ids
            if not choice.begun:
                body["prompt_token_ids"] = self._prompts[index]
        choice.begun = True
        choice.text_length += len(text)
        return [self._chunk(body, with_usage)]

    def _logprobs(self, reports: list[TokenLogprob], text_length: int) -> dict[str, Any] | None:
        if not reports:
            return None
        texts = [self.tokenizer.token_text(report.token_id) for report in reports]
        places = [text_length]
        for text in texts[:-1]:
            places.append(places[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [report.logprob for report in reports],
            "top_logprobs": [{self.tokenizer.token_text(i): p for i, p in report.top} for report in reports],
            "text_offset": places,
        }


class ChatAnswer(_Answer):
    """Of /v1/chat/completions."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def body(self) -> dict[str, Any]:
        choices = []
        for index in sorted(self._choices):
            choice = self._choices[index]
            body = {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            if self.request.return_token_ids:
                body["token_ids"] = choice.token_ids
            choices.append(body)
        return {**self._head, "object": self.object_name, "choices": choices}

    def chunks(self, index: int, output: Output, with_usage: bool) -> list[dict[str, Any]]:
        choice = self._choices.setdefault(index, _Choice())
        delta: dict[str, Any] = {"content": output.text}
        if not choice.begun:
            delta = {"role": "assistant", **delta}
        choice.begun = True
        body: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
        }
        if self.request.return_token_ids:
            body["token_ids"] = output.token_ids
        return [self._chunk(body, with_usage)]

    def _logprobs(self, reports: list[TokenLogprob]) -> dict[str, Any] | None:
        if not reports:
            return None
        return {
            "content": [
                {
                    **self._token(report.token_id, report.logprob),
                    "top_logprobs": [self._token(i, p) for i, p in report.top],
                }
                for report in reports
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

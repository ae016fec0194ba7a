"""Text to tokens: the checkpoint's tokenizer and its chat template, and the message boundaries that it makes known."""

import json
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jinja2

from holdover.errors import RequestError

log = logging.getLogger(__name__)
CACHED_BOUNDARIES = 256
ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTokenizer:
    """The tokenizer of a checkpoint folder, if it has one."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = None
        self._boundaries: OrderedDict[str, int | None] = OrderedDict()
        if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    @property
    def available(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text prompt, with the special tokens that the tokenizer adds by itself."""
        self._need_tokenizer("prompt")
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def token_text(self, token: int) -> str:
        """Text of one token, for log-probability reports."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        text: str = self._tokenizer.decode([token])
        return text

    def decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any] | None
    ) -> tuple[list[int], tuple[int, ...]]:
        """Token ids of a conversation up to where the assistant answers, and positions of message boundaries.

        Raises RequestError for messages that the template can't render.
        """
        self._need_tokenizer("messages")
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template; use /v1/completions.", param="messages")
        messages = [_checked(message, i) for i, message in enumerate(messages)]
        if not messages:
            raise RequestError("messages is empty; give at least one.", param="messages")
        text = self._render(messages, tools, options or {}, prompt=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        boundary = self._system_end(messages, tools, options or {}, text, ids)
        return ids, () if boundary is None else (boundary,)

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any], prompt: bool
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt, **options
            )
            return text
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}.", param="messages") from None

    def _system_end(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        text: str,
        ids: list[int],
    ) -> int | None:
        """Position at which system prompt and tools end: found by rendering them alone."""
        if messages[0]["role"] not in ("system", "developer") or len(messages) < 2:
            return None
        key = json.dumps([messages[0], tools, options], sort_keys=True, default=str)
        if key not in self._boundaries:
            self._boundaries[key] = self._find_system_end(messages[0], tools, options, text, ids)
            if len(self._boundaries) > CACHED_BOUNDARIES:
                self._boundaries.popitem(last=False)
        return self._boundaries[key]

    def _find_system_end(
        self,
        system: dict[str, Any],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        text: str,
        ids: list[int],
    ) -> int | None:
        try:
            alone = self._render([system], tools, options, prompt=False)
        except RequestError:
            return None
        if not text.startswith(alone):
            return None
        head: list[int] = self._tokenizer.encode(alone, add_special_tokens=False)
        same = next((i for i, (a, b) in enumerate(zip(head, ids, strict=False)) if a != b), min(len(head), len(ids)))
        return same or None

    def _need_tokenizer(self, param: str) -> None:
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer; send prompts as token ids.", param=param)


def _checked(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message in the form that templates expect: content as text, tool arguments as objects."""
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"messages[{index}].role is {role!r}; it must be one of {', '.join(ROLES)}.", f"messages[{index}].role"
        )
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        unlike = [part for part in content if not isinstance(part, dict) or part.get("type") != "text"]
        if unlike:
            raise RequestError(
                f"messages[{index}].content has a part that is not text; only text is supported.",
                f"messages[{index}].content",
            )
        message["content"] = "".join(str(part.get("text", "")) for part in content)
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{index}].content must be text.", f"messages[{index}].content")
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_arguments(call, index) for call in message["tool_calls"]]
    return message


def _with_arguments(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError(f"messages[{index}].tool_calls has no function.", f"messages[{index}].tool_calls")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # the template shows it as it is
    return {**call, "function": {**function, "arguments": arguments}}

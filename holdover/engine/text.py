"""Text of generated tokens as it grows, and stop strings in it."""

from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextDecoder(Protocol):
    """Turns tokens into text, one at a time; text may lag behind while a character is incomplete."""

    def add(self, token: int) -> str:
        """The text that this token completes."""


class StreamDecoder:
    """TextDecoder of a `tokenizers` tokenizer. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # bytes that are no text: begin again behind them
            self._stream = DecodeStream(skip_special_tokens=True)
            return "\ufffd"


class NoText:
    """For a model without a tokenizer."""

    def add(self, token: int) -> str:
        return ""


class StopStrings:
    """Finds stop strings in growing text, and holds back what may be the start of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Text that can be given out. Once a stop string is found, `found` is true and no text comes after it."""
        if not self._stops:
            return text
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            given, self._held = self._held[: min(places)], ""
            return given
        keep = max(self._possible_start(stop) for stop in self._stops)
        cut = len(self._held) - keep
        given, self._held = self._held[:cut], self._held[cut:]
        return given

    def _possible_start(self, stop: str) -> int:
        """Length of the longest end of the held text that is a start of `stop`."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        given, self._held = self._held, ""
        return given

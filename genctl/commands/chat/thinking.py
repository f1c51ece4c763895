"""The thought of a reasoning model before its answer: the text between think tags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from genctl.params import THOUGHT_TAGS

Part = tuple[Literal["thought", "answer"], str]


def split(text: str, begun: str = "") -> tuple[str, str]:
    """The thought and the answer of a whole text. `begun`: the prompt ends with this opening tag."""
    splitter = ThinkSplitter(begun)
    parts = [*splitter.feed(text), *splitter.finish()]
    thought, answer = ("".join(piece for kind, piece in parts if kind == which) for which in ("thought", "answer"))
    return thought.strip("\n"), answer


def opened_by(prompt: str) -> str:
    """The opening tag at the end of a prompt, as in those of DeepSeek-R1's template; "" if there is none."""
    return next((opening for opening, _ in THOUGHT_TAGS if prompt.rstrip().endswith(opening)), "")


@dataclass
class ThinkSplitter:
    """Splits a streamed text. Drops the tags, and white space between thought and answer.

    Only a thought at the beginning counts; later tags are text. `begun` is the opening tag at the end of the prompt.
    """

    begun: str = ""
    closing: str = ""  # the tag that ends the thought; "" outside a thought
    had_thought: bool = False
    over: bool = False  # whether the answer has begun
    _held: str = field(default="", repr=False)  # text that may be the beginning of a tag

    def __post_init__(self) -> None:
        if self.begun:
            self.closing, self.had_thought = dict(THOUGHT_TAGS)[self.begun], True

    def feed(self, text: str) -> list[Part]:
        """The parts that a piece completes."""
        text, self._held = self._held + text, ""
        if not (self.over or self.had_thought):
            start = text.lstrip()
            opening = next((tag for tag, _ in THOUGHT_TAGS if start.startswith(tag)), "")
            if not opening and any(tag.startswith(start) for tag, _ in THOUGHT_TAGS):
                self._held = text  # white space, or the beginning of a tag
                return []
            if opening:
                self.closing, self.had_thought = dict(THOUGHT_TAGS)[opening], True
                text = start[len(opening) :]
        return self._thought(text) if self.closing else self._answer(text)

    def finish(self) -> list[Part]:
        """The text held back, once no more follows."""
        held, self._held = self._held, ""
        return [("thought" if self.closing else "answer", held)] if held else []

    def _thought(self, text: str) -> list[Part]:
        thought, tag, rest = text.partition(self.closing)
        if not tag:
            keep = next((n for n in range(len(self.closing) - 1, 0, -1) if text.endswith(self.closing[:n])), 0)
            thought, self._held = text[: len(text) - keep], text[len(text) - keep :]
        else:
            self.closing = ""
        parts: list[Part] = [("thought", thought)] if thought else []
        return [*parts, *self._answer(rest)] if tag else parts

    def _answer(self, text: str) -> list[Part]:
        if self.had_thought and not self.over:
            text = text.lstrip()
        self.over = self.over or bool(text)
        return [("answer", text)] if text else []

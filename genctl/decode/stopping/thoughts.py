"""The tags around a model's thought: which a checkpoint has, and where a text is outside of a thought."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from genctl.params import THOUGHT_TAGS


class Tags(NamedTuple):
    """The tags of a thought."""

    opening: str
    closing: str
    end: str = ""  # what ends a thought, if the closing tag alone does not

    def is_open_in(self, text: str) -> bool:
        """Whether a text ends within a thought."""
        return text.rfind(self.opening) > text.rfind(self.closing)


# and those of gpt-oss, Command A, Kimi
FAMILIES = (
    *(Tags(opening, closing) for opening, closing in THOUGHT_TAGS),
    Tags("<|channel|>analysis<|message|>", "<|end|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("◁think▷", "◁/think▷"),
)


def added_tokens(tokenizer: Any) -> dict[int, Any]:
    """The added tokens of a tokenizer by id: those of its backend, if it has one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = getattr(tokenizer, "added_tokens_decoder", {}) if backend is None else backend.get_added_tokens_decoder()
    return dict(added)


def tags_of(tokenizer: Any) -> Tags | None:
    """The first of the families whose tags are in the chat template, or else in the vocabulary; None without any."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    added = {token.content for token in added_tokens(tokenizer).values()}
    for is_known in (template.__contains__, added.__contains__):
        for tags in FAMILIES:
            if is_known(tags.opening) and is_known(tags.closing):
                return tags
    return None


@dataclass(frozen=True)
class Thoughts:
    """Where new texts are thought."""

    openings: tuple[str, ...]  # the opening tag, in each way in which texts may have it
    closings: tuple[str, ...]
    is_open: bool  # at the beginning of the text

    def outside(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the parts of a text begin and end that are neither thought nor tags."""
        at, is_open = 0, self.is_open
        while True:
            places = [(text.find(tag, at), -len(tag)) for tag in (self.closings if is_open else self.openings)]
            place, length = min((place for place in places if place[0] >= 0), default=(len(text), 0))
            if not is_open:
                yield at, place
            if not length:
                return
            at, is_open = place - length, not is_open

    def answer_start(self, text: str) -> int:
        """Where the part of a text begins that is no thought and may go on; its end within a thought."""
        begin, end = max(self.outside(text), default=(0, 0))
        return begin if end == len(text) else len(text)

    def named_in(self, stop: str) -> bool:
        """Whether a stop names a tag: such a stop counts within thoughts, too."""
        return any(tag in stop for tag in (*self.openings, *self.closings))

"""One row of a batch: a prompt, or why it cannot be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class InputRow:
    """A prompt. Exactly one of `prompt`, `prompt_ids` and `messages` is set, and it is not empty."""

    id: str
    index: int  # position in the input from 0, bad rows counted
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None  # each in [0, 2**63); whether the model knows them is checked elsewhere
    messages: tuple[dict[str, str], ...] | None = None  # each {"role", "content"}
    params: dict[str, Any] = field(default_factory=dict)  # as written; checked where the knobs are known
    extra: dict[str, Any] = field(default_factory=dict)  # reference, prefix, system, negative_prompt
    where: str = ""  # "prompts.jsonl, line 17"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used. `message` is a whole sentence and names the line itself."""

    id: str
    index: int
    where: str
    code: str
    message: str  # "line 17: not JSON: …", so that it needs no `where` in front

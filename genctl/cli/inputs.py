"""Where a command's prompts come from, and whether a person sits at the other end of a stream."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, Any, Protocol

from genctl.batch import readers


class PromptOptions(Protocol):
    """What every command that reads prompts is asked for."""

    @property
    def arguments(self) -> Sequence[str]: ...
    @property
    def input(self) -> str | None: ...
    @property
    def input_format(self) -> str | None: ...


def prompts_of(asked: PromptOptions, **how: Any) -> readers.Prompts | None:
    """The prompts of a command line (see `readers.open_prompts`, which is given `how`); None if there are none."""
    return readers.open_prompts(
        asked.arguments,
        asked.input,
        sys.stdin,
        stdin_is_terminal=sys.stdin is None or is_terminal(sys.stdin),
        format=asked.input_format,  # type: ignore[arg-type]  # the option takes only these
        **how,
    )


def are_texts(asked: PromptOptions) -> bool:
    """Whether every prompt is a text, so that the checkpoint must have a tokenizer; JSONL rows may hold token ids."""
    return bool(asked.arguments) or readers.format_of(asked.input_format, asked.input or "") != "jsonl"


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a person is at the other end; a stream that is missing or closed counts as no terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False

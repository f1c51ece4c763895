"""Where a command's prompts come from, and whether a person sits at the other end of a stream."""

from __future__ import annotations

import sys
from typing import IO, Any

from genctl.batch import readers
from genctl.cli.options import ModelOptions


def prompts_of(asked: ModelOptions, **how: Any) -> readers.Prompts | None:
    """The prompts of a command line (see `readers.open_prompts`, which is given `how`); None if there are none."""
    return readers.open_prompts(
        asked.arguments,
        asked.input,
        sys.stdin,
        stdin_is_terminal=sys.stdin is None or is_terminal(sys.stdin),
        format=asked.input_format,
        **how,
    )


def are_texts(asked: ModelOptions) -> bool:
    """Whether every prompt is a text, so that the checkpoint must have a tokenizer; JSONL rows may hold token ids."""
    return bool(asked.arguments) or readers.format_of(asked.input_format, asked.input or "") != "jsonl"


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a person is at the other end; a stream that is missing or closed counts as no terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False

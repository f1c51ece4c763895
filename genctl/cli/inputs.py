"""Where the prompts of a command come from, and which streams are terminals."""

from __future__ import annotations

import sys
from typing import IO, Any

from genctl.batch import readers
from genctl.cli.options import ModelOptions


def prompts_of(options: ModelOptions, **how: Any) -> readers.Prompts | None:
    """The prompts of a command line, or None if there is none. `how` goes to `readers.open_prompts`."""
    return readers.open_prompts(
        options.arguments,
        options.input,
        sys.stdin,
        stdin_is_terminal=sys.stdin is None or is_terminal(sys.stdin),
        format=options.input_format,
        **how,
    )


def are_texts(options: ModelOptions) -> bool:
    """Whether every prompt is a text, which needs a tokenizer; JSONL rows may hold token ids."""
    return bool(options.arguments) or readers.format_of(options.input_format, options.input or "") != "jsonl"


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a stream is a terminal. One that is missing or closed is none."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False

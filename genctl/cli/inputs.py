"""Where the prompts of a command come from, and which streams are terminals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import IO, Any

from genctl.batch import readers
from genctl.cli.options import ModelOptions


def prompts_of(options: ModelOptions, hide: Callable[[], object] = lambda: None, **how: Any) -> readers.Prompts | None:
    """The prompts of a command line, or None if there is none. `how` goes to `readers.open_prompts`.

    Remarks on the input go to standard error, after `hide` has taken away what moves there.
    """

    def say(line: str) -> None:
        if not options.quiet:
            from genctl.render.message import print_message

            hide()
            print_message(line)

    return readers.open_prompts(
        options.arguments,
        options.input,
        sys.stdin,
        stdin_is_terminal=sys.stdin is None or is_terminal(sys.stdin),
        format=options.input_format,
        template=options.prompt_template,
        say=say,
        **how,
    )


def are_texts(options: ModelOptions) -> bool:
    """Whether every prompt is a text, which needs a tokenizer; JSONL rows may hold token ids."""
    if options.arguments or options.template is not None:
        return True
    return readers.format_of(options.input_format, options.input or "") != "jsonl"


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a stream is a terminal. One that is missing or closed is none."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False

"""Prompt templates: `Summarise: {prompt}`. Braces hold the name of a field; `{{` and `}}` are literal braces.

`{stdin}`, in a template or in a prompt, is all of standard input.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from genctl.config import reader
from genctl.config.reader import Unreadable
from genctl.errors import InputError, UsageError, cannot_read, nearest, printable, quote
from genctl.io.rows import RefusedRow

_MARK = re.compile(r"\{\{|\}\}|\{[^{}\n]+\}|[{}]")
MOST = 16 << 20  # bytes of a template file: the same limit as for a prompt
STDIN = "stdin"  # the field that stands for all of standard input


@dataclass(frozen=True)
class Template:
    """A parsed template: `literals` alternate with `fields`, and begin and end it."""

    text: str  # its source
    literals: tuple[str, ...]
    fields: tuple[str, ...]
    stdin: str | None = None  # the text of standard input, if it is a field

    def fill(self, values: Mapping[str, Any]) -> str:
        """The prompt. Strings are inserted unchanged, everything else as JSON. Raises RefusedRow."""
        pieces = [self.literals[0]]
        values = values if self.stdin is None else {**values, STDIN: self.stdin}
        for name, literal in zip(self.fields, self.literals[1:], strict=True):
            if name not in values:
                near = nearest(name, islice(values, 200))
                raise RefusedRow(f"template: no field {quote(name)}" + (f" (did you mean {near}?)" if near else ""))
            if values[name] is None:
                raise RefusedRow(f"template: the field {quote(name)} is null")
            is_text = isinstance(values[name], str)
            pieces += [values[name] if is_text else json.dumps(values[name], ensure_ascii=False), literal]
        return "".join(pieces)


def parse(text: str, name: str = "--template") -> Template:
    """Parse a template. Raises UsageError for a misplaced brace, or if it has no field."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name}: not UTF-8 at character {error.start + 1}") from None
    literals, fields, end = [""], [], 0
    for mark in _MARK.finditer(text):
        literals[-1] += text[end : mark.start()]
        end = mark.end()
        if mark[0] in ("{{", "}}"):
            literals[-1] += mark[0][0]
        elif len(mark[0]) == 1:
            raise UsageError(
                f"{name}: {mark[0]} at character {mark.start() + 1} belongs to no field",
                hint=f"a field is written as {{prompt}}, a literal brace as {mark[0] * 2}",
            )
        else:
            fields.append(mark[0][1:-1])
            literals.append("")
    literals[-1] += text[end:]
    if not fields:
        raise UsageError(f"{name}: there is no field in it, so all prompts would be equal", hint="write {prompt}")
    return Template(text, tuple(literals), tuple(fields))


def read(argument: str) -> Template:
    """The template of an option: the text itself, or `@FILE` without its last newline.

    Raises UsageError, and InputError for a file that cannot be read.
    """
    if not argument.startswith("@"):
        return parse(argument)
    path, shown = Path(argument[1:]), printable(argument[1:])
    try:
        text = reader.text(path, MOST).replace("\r\n", "\n")
    except Unreadable as error:
        raise InputError(f"--template: cannot read {shown}: {error}") from None
    return parse(text.removesuffix("\n"), f"--template {printable(argument)}")


def insert_stdin(
    arguments: Sequence[str],
    template: Template | None,
    stdin: IO[bytes] | IO[str] | None,
    *,
    is_terminal: bool,
    limit: int,
) -> tuple[Sequence[str], Template | None]:
    """The prompts and the template with `{stdin}` replaced by all of standard input, which is read here.

    `limit` is in bytes. Raises UsageError if standard input is a terminal, or the only field of the template, and
    InputError.
    """
    if template is not None and set(template.fields) == {STDIN}:
        raise UsageError("--template: {stdin} is its only field, so all prompts would be equal", hint="write {prompt}")
    if is_terminal:
        raise UsageError(
            "{stdin} stands for standard input, which is a terminal", hint="pipe a text in, or redirect it: < FILE"
        )
    if stdin is None:
        raise InputError("{stdin}: standard input is closed")
    try:
        binary: IO[bytes] = getattr(stdin, "buffer", stdin)  # type: ignore[arg-type]
        data = binary.read(limit + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(cannot_read("standard input", error, "{stdin}")) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{{stdin}}: standard input is not UTF-8 at byte {error.start + 1}") from None
    if len(data) > limit:
        raise InputError(f"{{stdin}}: standard input is longer than the limit of {limit} bytes")
    filled = [argument.replace("{stdin}", text) for argument in arguments]
    return filled, template and replace(template, stdin=text)


def note_unread(stdin: IO[bytes] | IO[str] | None, report: Callable[[str], object]) -> None:
    """Report a pipe with text on standard input that is not read. Nothing is consumed.

    Files are not reported: in `while read line; do genctl …; done < FILE` the rest belongs to the loop.
    """
    with suppress(ImportError, OSError, ValueError, AttributeError):  # Windows; stdin without a descriptor in tests
        import fcntl
        import termios

        descriptor = stdin.fileno()  # type: ignore[union-attr]
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        if is_pipe and int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder) > 0:
            report("note: standard input is not read: {stdin} in the prompt is its text, - as the prompt reads prompts")

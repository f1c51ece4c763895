"""A template of prompts: `Summarise: {prompt}`. Braces hold the name of a field; `{{` and `}}` are literal braces.

`{stdin}` is all of standard input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from genctl.documents import reader
from genctl.documents.reader import Unreadable
from genctl.errors import InputError, UsageError, nearest, printable, quote
from genctl.io.rows import RefusedRow

_MARK = re.compile(r"\{\{|\}\}|\{[^{}\n]+\}|[{}]")
MOST = 16 << 20  # bytes of a file: as of a prompt
_MOST = 12  # keys that a message lists
_COMPARED = 200  # keys that are compared with a missing field
STDIN = "stdin"  # the field that stands for all of standard input


@dataclass(frozen=True)
class Template:
    """A parsed template: `literals` alternate with `fields`, and begin and end it."""

    text: str  # as it is written
    literals: tuple[str, ...]
    fields: tuple[str, ...]

    @property
    def names_stdin(self) -> bool:
        """Whether `{stdin}` is one of its fields."""
        return STDIN in self.fields

    @property
    def is_stdin(self) -> bool:
        """Whether `{stdin}` is its only field."""
        return set(self.fields) == {STDIN}

    def fill(self, values: Mapping[str, Any]) -> str:
        """The prompt. Strings go in as they are, everything else as JSON. Raises RefusedRow."""
        pieces = [self.literals[0]]
        for name, literal in zip(self.fields, self.literals[1:], strict=True):
            if name not in values:
                keys = list(values)
                near = nearest(name, keys[:_COMPARED])
                hint = f" (did you mean {near}?)" if near else ""
                listed = ", ".join(printable(key[:60]) for key in keys[:_MOST]) + (", …" if len(keys) > _MOST else "")
                raise RefusedRow(f"template: no field {quote(name)}{hint}; the row has {listed or 'none'}")
            if values[name] is None:
                raise RefusedRow(f"template: the field {quote(name)} is null")
            is_text = isinstance(values[name], str)
            pieces += [values[name] if is_text else json.dumps(values[name], ensure_ascii=False), literal]
        return "".join(pieces)

    def with_stdin(self, text: str) -> Template:
        """The template with `{stdin}` replaced by a text. Its other fields stay."""
        literals, fields = [self.literals[0]], []
        for name, literal in zip(self.fields, self.literals[1:], strict=True):
            if name == STDIN:
                literals[-1] += text + literal
            else:
                fields.append(name)
                literals.append(literal)
        return replace(self, literals=tuple(literals), fields=tuple(fields))


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
        text = reader.read(path, MOST).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"--template: {shown} is not UTF-8 at byte {error.start + 1}") from None
    except Unreadable as error:
        raise InputError(f"--template: cannot read {shown}: {error}") from None
    return parse(text.removesuffix("\n"), f"--template {printable(argument)}")

"""Read and write TOML: errors in one sentence, the line of each key, and a writer whose output parses back."""

from __future__ import annotations

import datetime
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

from genctl.documents import reader
from genctl.documents.reader import Unreadable
from genctl.errors import PresetError, cannot_read

MAX_BYTES = 1 << 20
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

# The tokens that delimit statements: strings and comments (which may contain anything), brackets, line ends.
LEXEME = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")'
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{}\n=.]"
    r"|[A-Za-z0-9_-]+",
    re.DOTALL,
)


def printable(text: str, limit: int = 200) -> str:
    """`text` on one line, with unprintable characters as escapes."""
    shown = "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def read_bytes(path: Path) -> bytes:
    """The bytes of a small file. Raises PresetError if it is missing, too large, or cannot be read."""
    name = printable(str(path))
    try:
        return reader.read(path, MAX_BYTES, regular=True)
    except Unreadable as error:
        raise PresetError(cannot_read(name, error if os.path.lexists(path) else "no such file")) from None


def decode(data: bytes, name: str) -> str:
    """UTF-8 text with plain line ends. Raises PresetError with the line of the first wrong byte."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PresetError(f"{name}:{line}: not UTF-8 text (byte 0x{data[error.start]:02x})") from error


def parse(text: str, name: str) -> dict[str, Any]:
    """The table that TOML `text` holds. Raises PresetError with line and column, on one line."""
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        spot = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", str(error))
        reason = str(error)[: spot.start()] if spot else str(error)
        reason = printable(reason[:1].lower() + reason[1:])
        if spot and spot[1]:
            raise PresetError(f"{name}:{spot[1]}:{spot[2]}: not valid TOML: {reason}") from error
        line = text.count("\n") + 1
        column = len(text) - text.rfind("\n")
        raise PresetError(f"{name}:{line}:{column}: not valid TOML: {reason} at the end of the file") from error
    except RecursionError as error:
        raise PresetError(f"{name}: not valid TOML: nested too deeply") from error
    except ValueError as error:  # Python limits the digits of a number
        raise PresetError(f"{name}: not valid TOML: a number with too many digits") from error


def _statements(text: str) -> Iterator[tuple[int, bool, list[str]]]:
    """(line, whether it is a [table] header, the parts of its key) of each statement in a valid document."""
    line, depth, header = 1, 0, False
    key: list[str] | None = []  # None once the key of the statement is complete
    start = 1
    for match in LEXEME.finditer(text):
        lexeme = match[0]
        if lexeme == "\n":
            if depth == 0:
                key, header = [], False
        elif lexeme in "[{" and key == []:
            header = True
        elif lexeme in "[{":
            depth += 1
        elif lexeme in "]}" and header:
            if key:
                yield start, True, key
            key = None
            header = False
            continue
        elif lexeme in "]}":
            depth = max(depth - 1, 0)
        elif lexeme == "=" and key and depth == 0:
            yield start, False, key
            key = None
        elif lexeme not in ".=" and not lexeme.startswith("#") and key is not None:
            start = start if key else line
            key.append(_unquote(lexeme))
        line += lexeme.count("\n")


def _unquote(lexeme: str) -> str:
    if lexeme.startswith('"'):
        try:
            return str(tomli.loads(f"key = {lexeme}")["key"])
        except ValueError:
            return lexeme
    return lexeme.strip("'")


def places(text: str) -> dict[tuple[str, int, str], int]:
    """The line on which each key is first set: (key, 0, "") for a top-level one.

    In an array of tables it is (array, number of the table from 1, key), where the key "" is the header of a table.
    """
    found: dict[tuple[str, int, str], int] = {}
    counts: dict[str, int] = {}
    table: list[str] = []
    for line, header, key in _statements(text):
        if header:
            table = key
        top, *rest = key if header else table + key
        found.setdefault((top, 0, ""), line)
        if header and not rest:
            counts[top] = counts.get(top, 0) + 1
            found[top, counts[top], ""] = line
        elif table:
            found.setdefault((top, counts.get(top, 0), rest[0]), line)
    return found


def write_key(key: str) -> str:
    """`key` in TOML: bare where possible."""
    return key if BARE_KEY.fullmatch(key) else write_string(key)


def write_string(text: str) -> str:
    """A basic string on one line, with unprintable characters as escapes."""
    out = []
    for mark in text:
        code = ord(mark)
        if mark in '"\\':
            out.append("\\" + mark)
        elif mark.isprintable():
            out.append(mark)
        elif mark in "\b\t\n\f\r":
            out.append({"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}[mark])
        else:
            out.append(f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}")
    return '"' + "".join(out) + '"'


def write_value(value: Any) -> str:
    """`value` as TOML on one line; parsing it gives the same value and type back.

    Raises TypeError for values that TOML cannot hold, such as None.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isinf(value) or math.isnan(value):
            return str(value)
        return repr(value)
    if isinstance(value, str):
        return write_string(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        inner = ", ".join(f"{write_key(str(key))} = {write_value(item)}" for key, item in value.items())
        return "{ " + inner + " }" if inner else "{}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(write_value(item) for item in value) + "]"
    raise TypeError(f"TOML cannot hold {type(value).__name__}")

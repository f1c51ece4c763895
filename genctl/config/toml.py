"""Read and write TOML: errors in one sentence, the line of each key, and a writer whose output parses back."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

from genctl.config import reader
from genctl.config.reader import Unreadable
from genctl.errors import PresetError, cannot_read

MAX_BYTES = 1 << 20
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


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


_LINE = re.compile(r"""\s*\[{0,2}\s*(?:"([^"\\]*)"|'([^']*)'|([\w-]+))\s*[=.\]]""")


def lines_of(text: str) -> dict[str, int]:
    """The line on which each name first begins a statement: that of each top-level key, or of its table."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if name := _LINE.match(line):
            found.setdefault(name[name.lastindex or 0], number)
    return found


def write_key(key: str) -> str:
    """`key` in TOML: bare where possible."""
    return key if BARE_KEY.fullmatch(key) else write_string(key)


def write_string(text: str) -> str:
    """A basic string on one line, with unprintable characters as escapes."""
    return '"' + "".join(mark if mark.isprintable() and mark not in '"\\' else _escape(mark) for mark in text) + '"'


def _escape(mark: str) -> str:
    code = ord(mark)
    return _ESCAPES.get(mark) or (f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}")


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def write_value(value: Any) -> str:
    """`value` as TOML on one line; parsing it gives the same value and type back.

    Raises TypeError for values that TOML cannot hold, such as None.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
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

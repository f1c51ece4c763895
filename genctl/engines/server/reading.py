"""The body of an answer: decoded, bounded, cut into lines, read as JSON. All that a server sends comes this way."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from genctl.engines.server.failure import MALFORMED, Trouble, one_line
from genctl.errors import size

MOST_BYTES = 64 << 20  # of a body, decoded; of a stream for each of its sequences
MOST_REFUSAL = 1 << 20  # bytes that are read of the body of a failure
MOST_VALUES = 4_000_000  # in one JSON document: each takes up to a hundred bytes of memory
ENCODINGS = "gzip, deflate"  # that are asked for: both can be decoded piece by piece
_PIECE = 1 << 16  # decoded bytes that are made at once
_LONE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Body:
    """Decodes the pieces of a body as they come. Never makes more than `most` bytes in all. Raises Trouble."""

    def __init__(self, encoding: str, most: int) -> None:
        self._left = most
        self._most = most
        self._encoding = encoding.strip().lower()
        if self._encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise Trouble(f"the answer is encoded as {one_line(encoding, 40)}, which was not asked for", again=True)
        self._inflate: Any = None
        self._begun = False

    def pieces(self, raw: bytes) -> Iterator[bytes]:
        """The decoded bytes of a piece."""
        if self._encoding in ("", "identity"):
            yield self._counted(raw)
            return
        try:
            while raw:
                if self._inflate is None:
                    if self._begun and not raw.startswith(b"\x1f\x8b"):
                        return  # what follows the end is padding
                    self._inflate = zlib.decompressobj(_window(raw))
                    self._begun = True
                piece = self._inflate.decompress(raw, min(_PIECE, self._left + 1))
                yield self._counted(piece)
                raw = self._inflate.unconsumed_tail
                if self._inflate.eof:
                    raw, self._inflate = self._inflate.unused_data, None
        except zlib.error:
            raise Trouble(f"the answer is not encoded as {self._encoding}, as it says", again=True) from None

    def _counted(self, piece: bytes) -> bytes:
        self._left -= len(piece)
        if self._left < 0:
            raise Trouble(f"the answer is larger than {size(self._most, 0)}")
        return piece


def _window(raw: bytes) -> int:
    """The window bits of zlib: gzip or zlib by their header, else bare deflate, which some servers send."""
    wrapped = raw[:1] == b"\x1f" or (raw[0] & 0x0F == 8 and (len(raw) < 2 or int.from_bytes(raw[:2], "big") % 31 == 0))
    return zlib.MAX_WBITS | 32 if wrapped else -zlib.MAX_WBITS


class Lines:
    """Cuts a stream into lines. Only LF ends one: JSON may hold other line separators of Unicode as they are.

    A last line that is cut short is left out.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._first = True

    def feed(self, piece: bytes) -> Iterator[str]:
        """The lines that end in `piece`. Takes time in proportion to what is fed in all."""
        *whole, rest = piece.split(b"\n")
        for line in whole:
            self._rest += line
            text = self._rest.decode("utf-8", "replace").rstrip("\r")
            self._rest.clear()
            yield text.removeprefix("\ufeff") if self._first else text
            self._first = False
        self._rest += rest


def object_of(text: str, what: str, instead: str = "") -> dict[str, Any]:
    """The JSON object of an answer or of a part of it. Raises Trouble, which calls it `what`, for anything else.

    `instead` says what it is if it is not JSON.
    """
    if len(text) > MOST_VALUES and sum(map(text.count, ",[{")) > MOST_VALUES:
        raise Trouble(f"{what} holds more than {MOST_VALUES:,} values")
    try:
        value = loads(text.removeprefix("\ufeff"))
    except MALFORMED:
        raise Trouble(f"{what} is not JSON{instead}", again=True) from None
    if not isinstance(value, dict):
        raise Trouble(f"{what} is JSON, but no object", again=True)
    return value


def loads(text: str) -> Any:
    """The value of a JSON text. Lone surrogates, which no file can hold, become U+FFFD. Raises one of MALFORMED."""
    value = json.loads(text)
    return without_surrogates(value) if _ESCAPED_SURROGATE.search(text) else value


def without_surrogates(value: Any) -> Any:
    """A JSON value with U+FFFD for each half of a surrogate pair, which no file can hold."""
    if isinstance(value, str):
        return _LONE.sub("\ufffd", value)
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_LONE.sub("\ufffd", key): without_surrogates(item) for key, item in value.items()}
    return value


def part_of(data: str) -> dict[str, Any]:
    """The object of one event of a stream. Raises Trouble."""
    part = object_of(data, "a part of the stream")
    if part.get("error"):
        raise Trouble(said_in(part) or "the stream holds an error", again=True)
    return part


def message_of(content: bytes, kind: str) -> str:
    """What a server says of a failure, on one short line. `kind` is the type of the content."""
    try:
        return said_in(json.loads(content))
    except MALFORMED:
        return "" if "html" in kind else one_line(content[:4096].decode("utf-8", "replace"))


def said_in(data: Any) -> str:
    """The message of a JSON error, in any of the usual forms."""
    for name in ("error", "detail", "message", "msg"):
        if isinstance(data, Mapping) and data.get(name):
            return _said(data[name])
    return ""


def _said(error: Any) -> str:
    if isinstance(error, list) and error:  # of FastAPI's checks: [{"loc": ["body", "n"], "msg": "…"}]
        error = error[0]
        if isinstance(error, Mapping):
            parts = error.get("loc")
            place = ".".join(str(part)[:40] for part in (parts if isinstance(parts, list) else [parts])[:8])
            return one_line(f"{place}: {error.get('msg', '')}" if parts is not None else str(error.get("msg", "")))
    if isinstance(error, Mapping):
        error = error.get("message", "")
    return one_line(error) if isinstance(error, str) else ""

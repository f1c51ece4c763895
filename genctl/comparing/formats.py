"""Comparisons as TSV and as Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from genctl.batch.writers import Binary

COLUMNS = (
    "run", "id", "sequence", "seed", "finish_reason", "logprob", "score", "tokens", "mean_logprob", "perplexity",
    "entropy", "distinct_1", "distinct_2", "longest_repeat", "self_bleu", "exact_match", "chrf", "bleu", "ter",
    "text", "prompt", "error",
)  # fmt: skip

_UNSEEN = re.compile("[\\x00-\\x1f\\\\\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NAMES = {"\t": "\\t", "\n": "\\n", "\r": "\\r", "\\": "\\\\"}
_MARKS = re.compile(r"([\\`*_{}\[\]<>|#~])")


class ComparisonTsvWriter:
    """A header, then one line per record with always the same columns; what a record does not say is empty."""

    def __init__(self, sink: Binary) -> None:
        self._sink = sink
        self._header = "\t".join(COLUMNS) + "\n"

    def write(self, record: Mapping[str, Any]) -> None:
        fields = {**record.get("metrics", {}), **record}
        if error := record.get("error"):
            fields["error"] = f"{error['code']}: {error['message']}"
        line = "\t".join(_cell(fields.get(column)) for column in COLUMNS)
        piece, self._header = f"{self._header}{line}\n".encode(), ""
        self._sink.write(piece)

    def close(self) -> None:
        if self._header:
            piece, self._header = self._header.encode(), ""
            self._sink.write(piece)
        self._sink.close()


def _cell(value: Any) -> str:
    return "" if value is None else _UNSEEN.sub(_escape, str(value))


def _escape(found: re.Match[str]) -> str:
    letter = found[0]
    return _NAMES.get(letter) or (f"\\x{ord(letter):02x}" if letter <= "\xff" else f"\\u{ord(letter):04x}")


def markdown_text(text: str) -> str:
    """Text on one line in which Markdown sees no marks."""
    flat = " ".join(text.split())
    return _MARKS.sub(r"\\\1", _UNSEEN.sub(lambda found: "" if found[0] != "\\" else "\\", flat))


def markdown_block(text: str) -> str:
    """Text as it is, in a fence longer than any in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(longest + 1, 3)
    shown = re.sub(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", "\ufffd", text
    )
    return f"{fence}text\n{shown}\n{fence}"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [
        "| " + " | ".join(map(markdown_text, headings)) + " |",
        "|" + "|".join([":--", *["--:"] * (len(headings) - 1)]) + "|",
    ]
    lines += ["| " + " | ".join(map(markdown_text, row)) + " |" for row in rows]
    return "\n".join(lines)


def finite(value: float | None) -> float | None:
    """The number, or None where JSON has no word for it."""
    return value if value is not None and math.isfinite(value) else None

"""Comparisons as TSV and as Markdown, and numbers in the cells of tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from genctl.io.writers import TSV_UNSEEN

COLUMNS = (
    "run", "id", "sequence", "seed", "finish_reason", "logprob", "score", "tokens", "mean_logprob", "perplexity",
    "entropy", "distinct_1", "distinct_2", "longest_repeat", "self_bleu", "exact_match", "chrf", "bleu", "ter",
    "text", "prompt", "error"
)  # fmt: skip

_MARKS = re.compile(r"([\\`*_{}\[\]<>|#~])")


def markdown_text(text: str) -> str:
    """Text on one line with Markdown's marks escaped."""
    flat = " ".join(text.split())
    return _MARKS.sub(r"\\\1", TSV_UNSEEN.sub(lambda match: "" if match[0] != "\\" else "\\", flat))


def markdown_block(text: str) -> str:
    """Text unchanged, in a fence longer than any in it."""
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


def number(value: float | None, digits: int = 2) -> str:
    """A number in a cell: – if unknown, scientific if too large to read. What rounds to nothing has no sign."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) >= 1e6:
        return f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.2e}"
    text = f"{value:,.{digits}f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


def signed(value: float | None, digits: int = 2) -> str:
    """A difference in a cell."""
    shown = number(value, digits)
    return f"+{shown}" if value is not None and value > 0 and shown.strip("0.") else shown


def finite(value: float | None) -> float | None:
    """The number, or None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None

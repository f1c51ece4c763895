"""Make untrusted text safe for messages: short, on one line, without terminal controls."""

from __future__ import annotations


class RefusedRow(Exception):
    """A row that cannot be used, and why. It becomes a `BadRow` and never leaves this package."""


def printable(text: str) -> str:
    """`text` with unprintable characters (controls, bidi overrides, surrogates) as escapes."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def quote(text: str, most: int = 60) -> str:
    """`text` in quotes, unprintable characters as escapes, cut after `most` characters."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")

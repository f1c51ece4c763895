"""Other people's text inside our own sentences: short, on one line, and nothing in it can drive a terminal."""

from __future__ import annotations


class Refused(Exception):
    """One row that cannot be used, and why. It becomes a `BadRow`; it never leaves the room."""


def printable(text: str) -> str:
    """`text` with everything unprintable (controls, bidi overrides, surrogates) written as an escape."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def quote(text: str, most: int = 60) -> str:
    """`text` in quotes, unprintable characters as escapes, cut after `most` characters."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")

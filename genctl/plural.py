"""Numbers with their nouns."""

from __future__ import annotations


def count(number: int, singular: str, plural: str = "") -> str:
    """A number with its noun: `1 token`, `1,204 tokens`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"

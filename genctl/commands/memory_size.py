"""Sizes of memory as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from genctl.errors import UsageError

_MEMORY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,12})?)\s*([a-zA-Z]*)")
_UNITS: dict[str, int] = {"": 1, "b": 1, "bytes": 1} | {
    f"{letter}{middle}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for middle, base in (("i", 1024), ("", 1000))
}


def memory_bytes(text: str) -> int:
    """`24GiB`, `80 GB`, `1.5TiB` or plain bytes. KiB … TiB are powers of 1024, KB … TB of 1000. Raises UsageError."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"--memory {text!r:.60}: neither bytes nor like 24GiB (KiB, MiB, GiB, TiB; KB, MB, GB, TB)")
    amount = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if amount < 1:
        raise UsageError(f"--memory {text!r:.60} is no memory at all")
    return amount

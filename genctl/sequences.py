"""Operations on sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The length of the common prefix of two sequences."""
    for place, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return place
    return min(len(a), len(b))

"""JSON objects whose keys are given once. Python's reader takes the last of several."""

from __future__ import annotations

from typing import Any


class DuplicateKey(ValueError):
    """An object has `key` twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key!r:.80} is given twice")
        self.key = key


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for `json.loads`. Raises DuplicateKey."""
    items: dict[str, Any] = {}
    for key, value in pairs:
        if key in items:
            raise DuplicateKey(key)
        items[key] = value
    return items

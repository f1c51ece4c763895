"""The ids that a batch has used, in little memory: hashes of explicit ids, nothing for rows without one.

A million rows with explicit ids take about 100 MiB.
"""

from __future__ import annotations

import bisect
import hashlib

from genctl.errors import quote
from genctl.io.rows import RefusedRow


class UsedIds:
    """Checks whether an earlier row has an id.

    Explicit ids are stored as 64 bits of their hash with the row's index. Among a million ids two different ones
    collide with a probability of 3e-8; then the later row is refused as a duplicate, never confused with the other.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}  # hash of an explicit id -> the first row that has it
        self._first: list[int] = []  # runs of rows whose id is not their index: the first
        self._last: list[int] = []  # and last index

    def claim(self, own_id: str | None, index: int) -> None:
        """Claim an id (None: the index). Raises RefusedRow if an earlier row has it."""
        name = str(index) if own_id is None else own_id
        earlier = self._rows.get(_key(name)) if self._rows else None
        if own_id is not None:
            if earlier is None and len(name) < 20 and name.isdecimal() and name.isascii() and str(int(name)) == name:
                number = int(name)
                earlier = number if number < index and self._goes_by_index(number) else None
            self.not_by_index(index)
            self._rows.setdefault(_key(name), index if earlier is None else earlier)
        if earlier is not None:
            raise RefusedRow(f"the id {quote(name)} is already used in line {earlier + 1}")

    def not_by_index(self, index: int) -> None:
        """Note that the newest row has an explicit id, or is bad."""
        if self._last and self._last[-1] >= index - 1:
            self._last[-1] = index
        else:
            self._first.append(index)
            self._last.append(index)

    def _goes_by_index(self, index: int) -> bool:
        run = bisect.bisect_right(self._first, index) - 1
        return run < 0 or self._last[run] < index


def _key(name: str) -> int:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")

"""The ids that a batch has used, in little memory: hashes of explicit ids, nothing for rows without one.

A million rows with explicit ids take 34 MB.
"""

from __future__ import annotations

import bisect
import hashlib
from array import array

from genctl.batch.printable import RefusedRow, quote

_LEAST = 1 << 10  # places in the smallest table; a power of two


class UsedIds:
    """Checks whether an earlier row has an id.

    Explicit ids are stored as 63 bits of their hash with the row's index, in a table that is at most half full. Among a
    million ids two different ones collide with a probability of 5e-8; then the later row is refused as a duplicate,
    never confused with the other.
    """

    def __init__(self) -> None:
        self._keys = array("Q", bytes(8 * _LEAST))  # 0 is a free place
        self._rows = array("Q", bytes(8 * _LEAST))
        self._count = 0
        self._first: list[int] = []  # runs of rows whose id is not their index: the first
        self._last: list[int] = []  # and last index

    def claim(self, own_id: str | None, index: int) -> None:
        """Claim an id (None: the index). Raises RefusedRow if an earlier row has it."""
        name = str(index) if own_id is None else own_id
        if own_id is None:
            earlier = self._find(name) if self._count else None
        else:
            earlier = self._find(name)
            if earlier is None and len(name) < 20 and name.isdecimal() and name.isascii() and str(int(name)) == name:
                number = int(name)
                earlier = number if number < index and self._goes_by_index(number) else None
            self.not_by_index(index)
            self._keep(name, index if earlier is None else earlier)
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

    def _find(self, name: str) -> int | None:
        place = self._place(_key(name))
        return self._rows[place] if self._keys[place] else None

    def _keep(self, name: str, index: int) -> None:
        key = _key(name)
        place = self._place(key)
        if self._keys[place]:
            return  # the first row that has it stays
        self._keys[place], self._rows[place] = key, index
        self._count += 1
        if 2 * self._count > len(self._keys):
            self._grow()

    def _place(self, key: int) -> int:
        """The place of a key, or the free place for it."""
        keys, mask = self._keys, len(self._keys) - 1
        place = key & mask
        while keys[place] and keys[place] != key:
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        keys, rows = self._keys, self._rows
        size = 2 * len(keys)
        self._keys, self._rows = array("Q", bytes(8 * size)), array("Q", bytes(8 * size))
        for key, row in zip(keys, rows, strict=True):
            if key:
                place = self._place(key)
                self._keys[place], self._rows[place] = key, row


def _key(name: str) -> int:
    """A hash that is not 0."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") | 1

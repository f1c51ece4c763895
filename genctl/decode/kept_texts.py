"""Texts that the model has read, kept so that a later prompt that begins like one of them reads only the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genctl.decode.types import Prefix

MOST = 2**30  # bytes of all caches


class KeptTexts:
    """The newest texts, `most` bytes of their caches. Where nobody says how many, they are `MOST`, or what the last two
    take: a prompt, and the same with its answer. With `saved`, a prompt that was prefilled with `whole`, it alone.

    A cache whose layers keep every column may be cut anywhere. Any other (a sliding window, a recurrent state) serves
    only prompts that go on behind its whole text.
    """

    def __init__(self, most: int | None = None, *, saved: Prefix | None = None) -> None:
        self.saved = saved
        self.most, self.least = (MOST, 2) if most is None else (most, 0)
        self._kept: dict[tuple[int, ...], Prefix] = {}  # the newest last

    @property
    def grows(self) -> bool:
        """Whether texts are added."""
        return self.saved is None

    def keep(self, prefix: Prefix) -> None:
        """Keep a text that was read. One of which it is the beginning of is dropped if the new one can be cut."""
        if prefix.cache is None:
            return
        ids = tuple(prefix.tokens[0].tolist())
        self._kept.pop(ids, None)
        if prefix.cache.is_plain:
            for shorter in [other for other in self._kept if other == ids[: len(other)]]:
                del self._kept[shorter]
        elif any(other[: len(ids)] == ids and kept.cache.is_plain for other, kept in self._kept.items() if kept.cache):
            return
        self._kept[ids] = prefix
        while len(self._kept) > self.least and self.bytes > self.most:
            del self._kept[next(iter(self._kept))]

    @property
    def bytes(self) -> int:
        """The memory of all caches."""
        return sum(kept.cache.reserved() for kept in self._kept.values() if kept.cache is not None)

    def best(self, ids: Sequence[int]) -> Prefix | None:
        """The text that has most in common with the beginning of `ids`, if the rest can be read after it."""
        if self.saved is not None:
            return self.saved
        found: Prefix | None = None
        most = 0
        for kept_ids, prefix in self._kept.items():
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(kept_ids, ids, strict=False)))
            common = min(common, len(ids) - 1)  # the last token is read, for its scores
            assert prefix.cache is not None
            if common >= most and common > 0 and (common == len(kept_ids) or prefix.cache.is_plain):
                found, most = prefix, common
        if found is not None:  # it was used last
            key = tuple(found.tokens[0].tolist())
            self._kept[key] = self._kept.pop(key)
        return found

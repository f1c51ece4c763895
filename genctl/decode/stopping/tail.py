"""The end of a row's text, decoded from as few tokens as possible.

The beginning of a tail decoded alone may differ from the full text: a metaspace loses its blank, a continuing word
piece keeps its `##`, a character's first bytes are missing. So a few more tokens are decoded and their text is dropped.
The rest can differ only inside a run of byte tokens that is no valid UTF-8; a match there must be confirmed with
`full`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from genctl.decode.types import Written

BROKEN = "\N{REPLACEMENT CHARACTER}"
_HEAD = 4  # tokens with text that are decoded and dropped
_ALIGN = 8  # further tokens to search for one that begins a character
_SLACK = 24  # characters that a newest token may change before itself (" do not" -> " don't"), or _HEAD overestimates
_CHARACTER = 4  # bytes of the longest UTF-8 sequence


class _Size(NamedTuple):
    least: int  # quarters of a character that a token adds at least
    most: int  # characters that it adds at most
    aligned: bool  # whether it begins with a whole character


class TailText:
    """Decodes rows. `decode` turns tokens into text; `special` are the ids that it skips.

    `whole` gives the text of all new tokens where that depends on the prompt before them (a blank, half a character).
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        special: Collection[int] = (),
        whole: Callable[[list[int]], str] | None = None,
    ) -> None:
        self._decode, self._whole = decode, whole or decode
        self._special = {token for token in special if not decode([token])}
        self._sizes: dict[int, _Size] = {}  # at most one entry for each id of the vocabulary

    def silent(self, token: int) -> bool:
        """Whether this token does not change the text."""
        return token in self._special

    def full(self, written: Written) -> str:
        """The text of all new tokens, without a character whose bytes are incomplete."""
        return self._whole(written.tail(written.count)).rstrip(BROKEN)

    def ends(self, written: Written, characters: int) -> tuple[list[str], bool]:
        """The end of the text: the newest token's own and at least `characters` before it.

        Returns candidates, of which one is right (there are several only among byte tokens, where the beginning of a
        character is not certain), and whether they are the whole text. The cost depends on `characters`, not on the
        length of the row, unless tokens without any text lie between.
        """
        needed = characters + _SLACK
        size = 4 * _HEAD + needed // 2
        while True:
            ids = written.tail(size)
            if len(ids) >= written.count:
                return [self._whole(ids).rstrip(BROKEN)], True
            body = self._body(ids, 4 * needed)
            start = None if body is None else self._start(ids, body)
            if body is None or start is None:
                size *= 2
                continue
            texts = self._texts(ids, start, body)
            if len(texts[-1]) - self._size(ids[-1]).most >= characters + _SLACK // 4:
                return [text.rstrip(BROKEN) for text in texts], False
            needed *= 2

    def _body(self, ids: list[int], quarters: int) -> int | None:
        """The place where a tail begins that has this much text before the newest token."""
        for place in range(len(ids) - 2, -1, -1):
            quarters -= self._size(ids[place]).least
            if quarters <= 0:
                return place
        return None

    def _start(self, ids: list[int], body: int) -> int | None:
        """The place to begin decoding so that the text from `body` on is right."""
        place, seen = body, 0
        while seen < _HEAD:
            place -= 1
            if place < _CHARACTER - 1:
                return None
            seen += self._size(ids[place]).least > 0
        for earlier in range(place, max(place - _ALIGN, _CHARACTER - 1), -1):
            if self._size(ids[earlier]).aligned:
                return earlier
        return place

    def _texts(self, ids: list[int], start: int, body: int) -> list[str]:
        texts = []
        for begin in range(start, start - _CHARACTER, -1):
            text = self._decode(ids[begin:])
            texts.append(text[sum(self._size(token).most for token in ids[begin:body]) :])
            if not text.startswith(BROKEN):
                break
        return texts

    def _size(self, token: int) -> _Size:
        size = self._sizes.get(token)
        if size is None:
            # the second of two tokens is decoded in context: with its blank, without its ##
            alone, twice = self._decode([token]), self._decode([token, token])
            broken = alone.count(BROKEN)
            least = 4 * (len(twice) - len(alone)) - 3 * (twice.count(BROKEN) - broken)
            size = _Size(max(least, 0), len(alone) + (0 if broken else 2), bool(alone) and alone[0] != BROKEN)
            self._sizes[token] = size
        return size

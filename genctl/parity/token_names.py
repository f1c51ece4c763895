"""Texts by which servers name tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

Ids: TypeAlias = Sequence[int]


class TokenNames:
    """The ways in which servers write a token: as in the text, decoded alone, or as the vocabulary has it."""

    def __init__(self, tokenizer: Any, piece: Callable[[int], str]) -> None:
        """`tokenizer` is one of transformers; `piece` gives a token as it stands in a text."""
        self._tokenizer = tokenizer
        self.ways = (piece, self._alone, self._raw)
        self._ids: dict[int, dict[str, int | None]] = {}

    def _alone(self, id: int) -> str:
        return str(self._tokenizer.decode([id], clean_up_tokenization_spaces=False))

    def _raw(self, id: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(id))

    def fits(self, way: int, id: int, text: str) -> bool:
        """Whether a text is that of a token. A part of a character is written in many ways, and never told apart."""
        return text in (self.ways[way](id), self.ways[1](id) if "\ufffd" in text else None)

    def way_of(self, ids: Ids, texts: Iterable[str]) -> tuple[int, int]:
        """The way in which tokens are written, and how many texts from the beginning are those of `ids` then."""
        pairs = [*zip(ids, texts, strict=False)]
        fits = [[self.fits(way, *pair) for pair in pairs] for way in range(len(self.ways))]
        way = max(range(len(fits)), key=lambda way: sum(fits[way]))
        return way, [*fits[way], False].index(False)

    def text_of(self, ids: Ids) -> str | None:
        """The text that is read as these tokens; None where there is none."""
        text = str(self._tokenizer.decode([*ids], skip_special_tokens=True))
        return text if text and [*self._tokenizer(text)["input_ids"]] == [*ids] else None

    def id_of(self, way: int, text: str) -> int | None:
        """The only token with this text; None where there are several, or none."""
        if way not in self._ids:
            found: dict[str, int | None] = {}
            for id in sorted(self._tokenizer.get_vocab().values()):
                name = self.ways[way](id)
                found[name] = None if name in found else id
            self._ids[way] = found
        return None if "\ufffd" in text else self._ids[way].get(text)

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that servers may leave out at the end."""
        return frozenset(self._tokenizer.all_special_ids)

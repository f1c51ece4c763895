"""The text of rows: stops are decided on it, and it is shown and cut.

A `RowText` lies beside the tokens of a row and is forked with them. It asks a detokenizer for the characters of each
token; no other part of the core knows about text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from genctl.decode.stopping.stops import Stops


class Words(Protocol):
    """A detokenizer behind a prompt."""

    @property
    def only_ids(self) -> bool:
        """Whether there is no tokenizer: tokens are shown as their ids, which are no text."""

    def push(self, id: int) -> str:
        """The characters that a token completes, which later tokens do not change."""

    def rest(self) -> str:
        """The characters that would follow if the text ended here."""

    def piece(self, id: int) -> str:
        """A token alone, special ones included, as an alternative is shown."""

    def fork(self) -> Words:
        """A second detokenizer in the same state."""


class RowText:
    """The text of one row, of which no part is shown that a stop may still remove."""

    def __init__(self, words: Words, stops: Stops | None = None) -> None:
        self.words, self.stops = words, stops  # None: nothing cuts the text
        self.settled = ""  # what later tokens do not change; special tokens that stops name are marks in it
        self.since = 0  # of these, the characters from before the newest token
        self.shown = 0  # of these, the characters that were shown
        self._late: tuple[tuple[str, str], ...] = ()  # marks among characters that are not settled: `rest`, mark
        self._before: str | None = None  # the whole text before the newest token, if that is a stop token

    def fork(self) -> RowText:
        """A second row in the same state."""
        twin = RowText.__new__(RowText)
        vars(twin).update(vars(self))  # five times as fast as `copy.copy`
        twin.words = self.words.fork()
        return twin

    def push(self, token: int) -> None:
        """Add a token."""
        stops = self.stops
        self.since = len(self.settled)
        if stops is None:
            self.settled += self.words.push(token)
            return
        if token in stops.ids:
            self._before = self.whole()
        piece = self.words.push(token)
        mark = stops.marks.ids.get(token)
        if mark is not None:
            self._late += ((self.words.rest(), mark),)
        if self._late:
            piece, self._late = _with_marks(piece, self._late, final=False)
        self.settled += piece

    def whole(self) -> str:
        """The text if the row ends after the newest token, with marks."""
        rest = self.words.rest()
        return self.settled + (_with_marks(rest, self._late, final=True)[0] if self._late else rest)

    def show(self) -> str:
        """The text that can be shown after the newest token and was not shown before."""
        text, start, stops = self.settled, self.shown, self.stops
        self.shown = len(text) if stops is None else stops.safe(text, start)
        added = text[start : self.shown]
        return added if stops is None else stops.marks.clean(added)

    def finish(self, reason: str) -> tuple[str, str]:
        """End the row after the newest token. Returns the text that was not shown before, and the whole text."""
        text, stops = self.whole(), self.stops
        if stops is None:
            return text[self.shown :], "" if self.words.only_ids else text
        if reason == "stop":
            text = stops.cut(text if self._before is None else self._before)
        shown, text = stops.marks.clean(self.settled[: self.shown]), stops.marks.clean(text)
        return text[len(shown) :], "" if self.words.only_ids else text


def _with_marks(
    text: str, late: tuple[tuple[str, str], ...], *, final: bool
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The text with its marks, and the marks that come later.

    A mark stands behind the characters that are the same with and without the tokens after it: a character that is
    incomplete there is completed after the mark.
    """
    parts, done = [], 0
    later: list[tuple[str, str]] = []
    for rest, mark in late:
        if not final and len(rest) > len(text) and rest.startswith(text):
            later.append((rest[len(text) :], mark))
            continue
        pairs = enumerate(zip(rest, text, strict=False))
        same = next((place for place, (a, b) in pairs if a != b), min(len(rest), len(text)))
        here = max(same, done)
        parts += [text[done:here], mark]
        done = here
    return "".join([*parts, text[done:]]), tuple(later)

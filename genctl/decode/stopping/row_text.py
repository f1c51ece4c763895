"""The text of rows, in which stops are searched, and which is shown and cut.

A `RowText` accompanies the tokens of a row and is forked with them. It gets the characters of each token from a
detokenizer; no other part of the core handles text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from genctl.decode.stopping.stops import Stops


class Words(Protocol):
    """A detokenizer for the text after a prompt."""

    @property
    def only_ids(self) -> bool:
        """Whether there is no tokenizer: tokens are shown as their ids, and there is no text."""

    def push(self, id: int) -> str:
        """The characters that a token completes, which later tokens do not change."""

    def rest(self) -> str:
        """The characters that would follow if the text ended here."""

    def piece(self, id: int) -> str:
        """The text of a single token, special ones included, as alternatives are shown."""

    def fork(self) -> Words:
        """A second detokenizer in the same state."""


class RowText:
    """The text of one row. Text that a stop may still remove is not shown."""

    def __init__(self, words: Words, stops: Stops | None = None) -> None:
        self.words, self.stops = words, stops  # stops None: nothing cuts the text
        self.settled = ""  # text that later tokens do not change; special tokens that stops name are marks in it
        self.since = 0  # how many of its characters come from before the newest token
        self.shown = 0  # how many of its characters were shown
        self._late: tuple[tuple[str, str], ...] = ()  # marks among characters that are not settled: (`rest`, mark)
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
        """The text, with marks, as if the row ended after the newest token."""
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

    A mark follows the characters that are the same with and without the tokens after it: a character that is incomplete
    at the mark is completed after it.
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

"""Texts on a stream while they grow: as they are in a pipe; on a terminal word-wrapped, without control characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from rich.console import Console

from genctl.events import Event
from genctl.events.history import ROOT, LaneHistory, Path, StablePrefix
from genctl.terminal.run_history import RunHistory
from genctl.terminal.text_width import dim_codes, terminal_wrap
from genctl.terminal.widgets import visible

Write: TypeAlias = Callable[[str, bool], object]  # a piece of text, line ends included, and whether it is dimmed


def console_writer(console: Console, *, as_it_is: bool = False) -> Write:
    """What writes to a console at once: to render a token would cost more than to decode it.

    `as_it_is`: a pipe gets the text without any change.
    """
    wrap, codes = terminal_wrap(console), dim_codes(console) if console.is_terminal else ("", "")
    as_it_is = as_it_is and not console.is_terminal

    def write(text: str, dim: bool) -> None:
        shown = text if as_it_is else visible(text)
        if wrap is not None:
            wrap.write(shown, dim=dim)
        else:
            console.file.write(f"{codes[0]}{shown}{codes[1]}" if dim else shown)
        console.file.flush()

    return write


class TextStream:
    """One text after the other, each while it grows. What writing raises is passed on."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.line_open = False
        self.begin(None)

    def begin(self, lane: str | None) -> None:
        """Begin the text of a lane; None ends the one before."""
        self.lane = lane
        self.path = ROOT  # up to where the text is shown
        self._pieces: list[str] = []

    def take(self, path: Path) -> str:
        """What `path` adds to the text. The caller shows it."""
        if path.length <= self.path.length:
            return ""
        piece, self.path = path.text(self.path.chars), path
        self._pieces.append(piece)
        return piece

    def complete(self, text: str) -> None:
        """Write what is missing of the whole text, such as half a character."""
        shown = "".join(self._pieces)
        if text.startswith(shown):
            self.write(text[len(shown) :])
        elif not shown.startswith(text):  # another row is returned than the one that was shown
            self.end_line()
            self.write(text)

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write a piece of text."""
        if text:
            self._write(text, dim)
            self.line_open = not text.endswith("\n")

    def end_line(self) -> None:
        """End the line that is open, if there is one."""
        if self.line_open:
            self.write("\n")


def recorded_prompt(lane: LaneHistory) -> str:
    """The prompt as the model reads it; a text that answers it follows in a second column."""
    if lane.began is None:
        return ""
    return lane.began.prompt + ("\t" if lane.began.encoder_decoder else "")


class StableTexts:
    """The stable part of each lane's first sequence; the lanes follow one another in the order in which they began.

    Further sequences follow when their lane is done, each on its own line. Failed lanes are skipped. `prompt` is what
    comes before each text. `feed` raises InputError for an event that cannot follow the ones before it.
    """

    def __init__(self, write: Write, prompt: Callable[[LaneHistory], str] = lambda lane: "") -> None:
        self._stream = TextStream(write)
        self._prompt = prompt
        self._history = RunHistory()
        self._stable = StablePrefix()

    def feed(self, event: Event) -> None:
        """Take in one event and write what it makes stable."""
        self._history.feed(event)
        while self._history.lanes:
            lane = next(iter(self._history.lanes.values()))
            if not lane.over:
                path = self._stable(lane)
                if path.chars > self._stream.path.chars:
                    self._begin(lane)
                    self._stream.write(self._stream.take(path))
                return
            self._finish(lane)
            self._history.forget(lane.lane)

    def close(self) -> None:
        """End the line that is open, if there is one."""
        self._stream.end_line()

    def _begin(self, lane: LaneHistory) -> None:
        if self._stream.lane != lane.lane:
            self._stream.begin(lane.lane)
            self._stream.write(self._prompt(lane), dim=True)

    def _finish(self, lane: LaneHistory) -> None:
        hypotheses = lane.finished.hypotheses if lane.finished else ()
        for one, path in zip(hypotheses, lane.paths_of(hypotheses), strict=True):
            self._begin(lane)
            self._stream.complete(one.text or (path.text() if path else ""))
            self._stream.write("\n")
            self._stream.begin(None)
        self._stream.end_line()  # it failed on the way
        self._stream.begin(None)

"""Stream growing texts: unchanged to a pipe; to a terminal word-wrapped and without control characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from rich.console import Console

from genctl.events import Event
from genctl.events.history import ROOT, LaneHistory, Path, StablePrefix
from genctl.terminal.run_history import RunHistory
from genctl.terminal.text_width import dim_codes, terminal_wrap
from genctl.terminal.widgets import visible

Write: TypeAlias = Callable[[str, bool], object]  # takes a piece of text with its line ends, and whether it is dimmed


def console_writer(console: Console, *, as_it_is: bool = False) -> Write:
    """A function that writes to a console directly: rendering a token would cost more than decoding it.

    `as_it_is`: a pipe gets the text unchanged.
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
    """Streams one text after another, each as it grows. Errors of writing are passed on."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.line_open = False
        self.begin(None)

    def begin(self, lane: str | None) -> None:
        """Begin the text of a lane; None ends the current one."""
        self.lane = lane
        self.path = ROOT  # the text is shown up to here
        self._pieces: list[str] = []

    def take(self, path: Path) -> str:
        """The text that `path` adds, for the caller to show."""
        if path.length <= self.path.length:
            return ""
        piece, self.path = path.text(self.path.chars), path
        self._pieces.append(piece)
        return piece

    def complete(self, text: str) -> None:
        """Write the rest of the whole text, such as an incomplete last character."""
        shown = "".join(self._pieces)
        if text.startswith(shown):
            self.write(text[len(shown) :])
        elif not shown.startswith(text):  # the returned row is not the one that was shown
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
    """The prompt as the model reads it; the text of an encoder-decoder follows in a second column."""
    if lane.began is None:
        return ""
    return lane.began.prompt + ("\t" if lane.began.encoder_decoder else "")


class StableTexts:
    """Streams the stable part of each lane's first sequence, one lane after another in the order in which they began.

    Further sequences follow when their lane is done, each on its own line. Failed lanes are skipped. `prompt` returns
    the text before each sequence. `feed` raises InputError for an event that cannot follow the earlier ones.
    """

    def __init__(self, write: Write, prompt: Callable[[LaneHistory], str] = lambda lane: "") -> None:
        self._stream = TextStream(write)
        self._prompt = prompt
        self._history = RunHistory()
        self._stable = StablePrefix()

    def feed(self, event: Event) -> None:
        """Process one event and write the text that it makes stable."""
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
        self._stream.end_line()  # the lane may have failed in the middle of a line
        self._stream.begin(None)

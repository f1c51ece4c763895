"""An answer on a terminal while it comes: the text, and a thought before it, dimmed and folded when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from genctl.commands.chat.thinking import ThinkSplitter
from genctl.errors import count
from genctl.events import Event, Finished, Loading, Stepped
from genctl.events.history import LaneHistory, StablePrefix
from genctl.terminal import theme, widgets
from genctl.terminal.live_region import LiveRegion
from genctl.terminal.text_width import last_cells, terminal_wrap


class AnswerView:
    """Writes one answer to a terminal. Feed it the answer's events, then `close` it.

    While a thought lasts, one line shows its end, then how long it was; where nothing can be redrawn, the thought
    stays. `begun` is the think tag that ends the prompt, `prefill` the beginning of the answer.
    """

    def __init__(
        self, out: Console, *, begun: str = "", prefill: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._clock = clock
        self._wrap = terminal_wrap(out)
        self._splitter = ThinkSplitter(begun)
        self._region = LiveRegion(out, clock)
        self._thought: list[str] = []  # its pieces
        self._server_thought = ""
        self._thought_tokens = 0
        self._open = False  # whether a line has no end yet
        self._folded = False
        self._lane: LaneHistory | None = None
        self._certain = StablePrefix()
        self._shown = ""  # what is certain of the answer
        for kind, piece in self._splitter.feed(prefill):
            self._show(kind, piece)

    def feed(self, event: Event) -> None:
        """Show what an event makes certain."""
        if isinstance(event, Loading):
            return
        self._lane = (self._lane or LaneHistory(event.lane)).after(event)
        if isinstance(event, Finished) and event.hypotheses:
            text = event.hypotheses[0].text
            self._take_thought(event.hypotheses[0].thought_text[len(self._server_thought) :], 1)
            self._take(text[len(self._shown) :] if text.startswith(self._shown) else f"\n{text}")
        elif isinstance(event, Stepped):
            for row in event.rows[:1]:
                self._take_thought(row.thought, event.new_tokens or 1)
            if self._splitter.closing:
                self._thought_tokens += event.new_tokens
            self._take(self._certain(self._lane).text(len(self._shown)))

    def hide(self) -> None:
        """Take away what moves."""
        self._region.hide()

    def close(self) -> None:
        """End the answer: nothing is held back, and its line ends."""
        for kind, text in self._splitter.finish():
            self._show(kind, text)
        self._fold()
        if self._open:
            self._write("\n")
        self._out.file.flush()

    def _take_thought(self, text: str, tokens: int) -> None:
        """Show what a server adds to a thought that it keeps apart from the answer."""
        if text:
            self._server_thought += text
            self._splitter.had_thought = True
            self._thought_tokens += tokens
            self._show("thought", text)
            self._out.file.flush()

    def _take(self, text: str) -> None:
        if text:
            self._shown += text
            for kind, piece in self._splitter.feed(text):
                self._show(kind, piece)
            self._out.file.flush()

    def _show(self, kind: str, text: str) -> None:
        if kind == "answer":
            self._fold()
            self._write(text)
            return
        self._thought.append(text)
        if not self._out.is_interactive:
            self._write(text, dim=True)
        elif self._region.is_due(self._clock()):
            end = last_cells("".join(self._thought[-400:]).strip("\n"), self._out.width - 2)
            self._region.draw([Text(f"│ {end}", style=theme.DIM)])

    def _fold(self) -> None:
        """The thought is over: one line takes its place."""
        self._region.hide()
        if self._folded or not self._splitter.had_thought:
            return
        self._folded = True
        if self._out.is_interactive:
            line = f"thought for {count(self._thought_tokens, 'token')} (/think shows it)"
            self._out.print(widgets.fit(Text(line, style=theme.DIM), self._out.width))
        elif self._open:
            self._write("\n")

    def _write(self, text: str, *, dim: bool = False) -> None:
        shown = widgets.visible(text)
        if self._wrap is not None:
            self._wrap.write(shown, dim=dim)
        else:
            self._out.file.write(shown)
        self._open = not text.endswith("\n")

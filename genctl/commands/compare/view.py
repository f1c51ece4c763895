"""The live view of a comparison: columns of growing text, or the progress of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from genctl.commands.compare.report import column_title, join_columns, prompt_lines, side_by_side
from genctl.events import Began, Event, Failed, Finished, Prefilled, Stepped
from genctl.terminal import theme, widgets
from genctl.terminal.live_layout import Look, Section, sections_of, text_lines
from genctl.terminal.live_region import ErasedView, LiveRegion
from genctl.terminal.progress_bars import LoadingBar, RowsBar
from genctl.terminal.run_history import RunHistory

_LOOK = Look()


@dataclass(frozen=True)
class Column:
    """A run on the screen: its name and the lanes that write its texts."""

    title: str
    lanes: tuple[str, ...]


class CompareView(ErasedView):
    """Draws the texts of one prompt on `out` if `live`, else how many are done on `err`.

    `begin` says which lanes belong to which column. Redrawn at most every 50 ms; `hide` erases it, so that results can
    be printed. Never taller than the terminal: the oldest lines of each text are left out. `quiet`: no bars. `clock`
    gives seconds.
    """

    def __init__(
        self,
        out: Console,
        err: Console,
        *,
        live: bool,
        quiet: bool = False,
        total: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out = out
        self._live = live and out.is_interactive
        self._quiet = quiet
        self._clock = clock
        self._bar = LoadingBar(err, clock)
        self._err, self._total = err, 0 if live or quiet else total
        self._texts: RowsBar | None = None  # made with the first event, so that loading does not count
        self._story = RunHistory()
        self._heading: Text | None = None
        self._columns: tuple[Column, ...] = ()
        self._prompt = ""
        self._region = LiveRegion(out, clock)

    def begin(self, heading: Text | None, columns: Sequence[Column], prompt: str = "") -> None:
        """Start the next texts: their heading, and a column for each run. Finished lanes stay until `forget`.

        A `prompt` stands above them, where a third of the screen has room for it.
        """
        self._heading, self._columns, self._prompt = heading, tuple(columns), prompt

    def feed(self, event: Event) -> None:
        """Take in one event and show what it changes. Raises InputError for one that cannot follow the others."""
        if self._bar.takes(event, quiet=self._quiet):
            return
        if self._texts is None and self._total > 1:
            self._texts = RowsBar(self._err, self._total, what="texts", clock=self._clock)
        if self._texts is not None:
            if isinstance(event, (Finished, Failed)):
                self._texts.row(failed=isinstance(event, Failed))
            else:
                self._texts.feed(event)
        if not self._live:
            return
        self._story.feed(event)
        if isinstance(event, (Began, Prefilled)):
            return
        if self._region.is_due(self._clock()) or not isinstance(event, Stepped):
            self._draw()

    def forget(self) -> None:
        """Drop the texts of these columns."""
        self._story = RunHistory()

    def hide(self) -> None:
        """Erase the live region and every bar."""
        self._bar.close()
        if self._texts is not None:
            self._texts.hide()
        self._region.hide()

    def _draw(self) -> None:
        height = max(self.out.height - 1, 1)
        above = [] if self._heading is None or height < 2 else [self._heading]
        if self._prompt:
            prompt = prompt_lines(self._prompt, self.out, self.out.width)
            above += [*prompt, Text("")] if len(prompt) < height // 3 else []
        self._region.draw([*above, *picture(self._story, self._columns, self.out, self.out.width, height - len(above))])


def picture(history: RunHistory, columns: Sequence[Column], console: Console, width: int, height: int) -> list[Text]:
    """The columns in at most `height` lines: side by side, or stacked if that is too narrow."""
    cells = side_by_side(width, len(columns))
    if cells:
        bodies = [
            [column_title(column.title, cells), *_body(_texts(history, column), console, cells, height - 1)]
            for column in columns
        ]
        return join_columns(bodies, cells)[: max(height, 1)]
    room, shown = height, columns[: max(height // 2, 1)]
    if len(shown) < len(columns) and height > 2:
        room, shown = height - 1, columns[: (height - 1) // 2]
    lines: list[Text] = []
    for place, column in enumerate(shown):
        share, texts = max(room // (len(shown) - place), 1), _texts(history, column)
        state = texts[0][1] if len(texts) == 1 else ""
        body = _body([(section, "") for section, _ in texts] if state else texts, console, width, share - 1)
        part = [widgets.header(width, column.title, state), *body][:share]
        lines += part
        room -= len(part)
    return _cut(lines, len(columns) - len(shown), width, height)


def _texts(history: RunHistory, column: Column) -> list[tuple[Section, str]]:
    """The texts of a column, each with its state."""
    texts = []
    for name in column.lanes:
        lane = history.lanes.get(name)
        seed = [f"seed {lane.began.seed}"] if lane and lane.began and lane.began.seed is not None else []
        for section in sections_of(lane, _LOOK) if lane else ():
            words = [*(seed if len(column.lanes) > 1 else []), *filter(None, section.heading[2:])]
            texts.append((section, " · ".join(words)))
    return texts


def _body(texts: Sequence[tuple[Section, str]], console: Console, width: int, height: int) -> list[Text]:
    """Texts in at most `height` lines: above each its state, then the end that fits."""
    if not texts and height > 0:
        return [Text("waiting", style=theme.DIM, no_wrap=True)]
    shown = texts[: max(height // 2, 1)]
    room = height - (len(shown) < len(texts))
    lines: list[Text] = []
    for place, (section, state) in enumerate(shown):
        share = max(room // (len(shown) - place), 1)
        part = [Text(widgets.first_words(state, width), style=theme.DIM)] if state and share > 1 else []
        if section.lane.failed is None:
            part += text_lines(section, _LOOK, console, share - len(part), width)
        else:
            part.append(Text(widgets.first_words(section.lane.failed.message, width), style=theme.ERROR))
        lines += part
        room -= len(part)
    return _cut(lines, len(texts) - len(shown), width, height)


def _cut(lines: list[Text], hidden: int, width: int, height: int) -> list[Text]:
    """At most `height` lines of at most `width` cells; the last one counts the texts that are not shown, if any."""
    if hidden and height > 1:
        lines = [*lines[: height - 1], Text(f"… and {hidden} more", style=theme.DIM)]
    return [widgets.fit(line, width) for line in lines[: max(height, 0)]]

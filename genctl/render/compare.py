"""A comparison while it goes on: columns of text that grow side by side, or how far a batch has come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from genctl.events import Began, Event, Failed, Finished, Loading, Prefilled, Stepped
from genctl.render import parts, theme
from genctl.render.comparison import column_title, join_columns, side_by_side
from genctl.render.loading_bar import LoadingBar
from genctl.render.story import LaneStory, Story, fold
from genctl.render.tail import Look, Section, sections_of, text_lines

FRAME_S = 0.05
_LOOK = Look()


@dataclass(frozen=True)
class Column:
    """A run on the screen: its name and the lanes that write its texts."""

    title: str
    lanes: tuple[str, ...]


class CompareView:
    """Draws what is under way: the texts of one prompt on `out` if `live`, else how many are done on `err`.

    `begin` says which lanes stand in which column. The picture is redrawn when an event comes and 50 ms have passed;
    `hide` takes it away, so that what stays can be printed. It is never taller than the terminal: of each text the
    oldest lines go. `quiet`: no bars. `clock` gives seconds.
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
        self._texts = _Texts(err, total, clock) if not (live or quiet) and err.is_interactive and total > 1 else None
        self._story = Story()
        self._heading: Text | None = None
        self._columns: tuple[Column, ...] = ()
        self._picture: Live | None = None
        self._drawn = float("-inf")

    def begin(self, heading: Text | None, columns: Sequence[Column]) -> None:
        """The next texts: what stands above them, and a column for each run. Finished lanes stay until `forget`."""
        self._heading, self._columns = heading, tuple(columns)

    def feed(self, event: Event) -> None:
        """Take in one event and show what it changes. Raises InputError for one that cannot follow the others."""
        if isinstance(event, Loading):
            if not self._quiet:
                self._bar.show(event)
            return
        self._bar.close()
        if self._texts is not None and isinstance(event, (Finished, Failed)):
            self._texts.advance()
        if not self._live:
            return
        self._story = fold(self._story, event)
        if isinstance(event, (Began, Prefilled)):
            return
        now = self._clock()
        if now - self._drawn >= FRAME_S or not isinstance(event, Stepped):
            self._draw()
            self._drawn = self._clock()  # after the drawing, so that a slow terminal never takes more than its share

    def forget(self) -> None:
        """The texts of these columns are settled: nothing of them is needed any more."""
        self._story = Story()

    def hide(self) -> None:
        """Take away the picture and every bar."""
        self._bar.close()
        if self._texts is not None:
            self._texts.hide()
        if self._picture is not None:
            picture, self._picture = self._picture, None
            picture.update(Text(""))
            picture.stop()
            self._drawn = float("-inf")

    def __enter__(self) -> CompareView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError) if isinstance(error, OSError) else contextlib.nullcontext():
            self.hide()

    def _draw(self) -> None:
        height = max(self.out.height - 1, 1)
        lines = picture(self._story, self._columns, self.out, self.out.width, height - (self._heading is not None))
        if self._heading is not None and height > 1:
            lines = [self._heading, *lines]
        if self._picture is None:
            self._picture = Live(
                console=self.out,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._picture.start()
        self._picture.update(Group(*lines), refresh=True)


def picture(story: Story, columns: Sequence[Column], console: Console, width: int, height: int) -> list[Text]:
    """The columns as they stand, in at most `height` lines: side by side, or in a stack where that is too narrow."""
    cells = side_by_side(width, len(columns))
    if cells:
        made = [
            [column_title(column.title, cells), *_body(_sections(story, column), console, cells, height - 1)]
            for column in columns
        ]
        return join_columns(made, cells)[: max(height, 1)]
    shown = columns[: max(height // 2, 1)]
    hidden = len(columns) - len(shown)
    if hidden and height > 2:
        shown, hidden = columns[: (height - 1) // 2], len(columns) - (height - 1) // 2
    room = height - (hidden > 0)
    lines: list[Text] = []
    for place, column in enumerate(shown):
        share = max(room // (len(shown) - place), 1)
        sections = _sections(story, column)
        state = sections[0][1] if len(sections) == 1 else ""
        part = [parts.header(width, column.title, state), *_body(sections, console, width, share - 1, stated=True)]
        lines += part[:share]
        room -= min(len(part), share)
    if hidden:
        lines.append(Text(f"… and {hidden} more", style=theme.DIM, no_wrap=True))
    for line in lines:
        line.truncate(width)
    return lines[: max(height, 1)]


def _sections(story: Story, column: Column) -> list[tuple[Section, str]]:
    """The texts of a column and what is to say of each."""
    found = []
    for name in column.lanes:
        lane = story.lanes.get(name)
        if lane is None:
            continue
        several = len(column.lanes) > 1
        for section in sections_of(lane, _LOOK):
            words = [word for word in section.heading[2:] if word]
            if several and lane.began:
                words.insert(0, f"seed {lane.began.seed}")
            found.append((section, " · ".join(words)))
    return found


def _body(
    sections: Sequence[tuple[Section, str]], console: Console, width: int, height: int, *, stated: bool = False
) -> list[Text]:
    """Texts in at most `height` lines, each with the end that fits. `stated`: the words of a lone one stand above."""
    if height < 1:
        return []
    if not sections:
        return [Text("waiting", style=theme.DIM, no_wrap=True)]
    several = len(sections) > 1
    shown = sections[: max(height // (1 + several), 1)]
    hidden = len(sections) - len(shown)
    room = height - (hidden > 0 and height > 1)
    lines: list[Text] = []
    for place, (section, words) in enumerate(shown):
        share = max(room // (len(shown) - place), 1)
        note = Text(parts.first_words(words, width), style=theme.DIM, no_wrap=True)
        headed = several and share > 1 and bool(words)
        ended = _over(section.lane) and not several and not stated and share > 1 and bool(words)
        body = (
            [Text(parts.first_words(_failed(section.lane), width), style=theme.ERROR)]
            if section.lane.failed
            else (text_lines(section, _LOOK, console, share - headed - ended, width))
        )
        part = [*([note] if headed else []), *body, *([note] if ended else [])]
        lines += part
        room -= len(part)
    if hidden and len(lines) < height:
        lines.append(Text(f"… and {hidden} more", style=theme.DIM, no_wrap=True))
    return lines[:height]


def _over(lane: LaneStory) -> bool:
    return lane.finished is not None


def _failed(lane: LaneStory) -> str:
    return lane.failed.message if lane.failed else ""


class _Texts:
    """How many texts are done, on a terminal, gone when they all are."""

    def __init__(self, console: Console, total: int, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._total, self._done = total, 0
        self._drawn = float("-inf")
        self._progress: Progress | None = None

    def advance(self) -> None:
        """One more text is done."""
        self._done += 1
        if self._progress is None:
            self._progress = Progress(
                TextColumn("comparing", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("texts"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self._total)
        if self._clock() - self._drawn >= FRAME_S or self._done == self._total:
            self._progress.update(self._task, completed=self._done)
            self._progress.refresh()
            self._drawn = self._clock()

    def hide(self) -> None:
        """Take the bar away; the next text brings it back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._drawn = float("-inf")

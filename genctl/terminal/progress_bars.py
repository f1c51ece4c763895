"""The progress of a batch (rows, tokens per second, time left), and of downloading and reading a checkpoint.

Only on a terminal. Without a total a batch has no bar, only the words. A dumb terminal gets lines, ever more rarely.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from genctl.errors import size
from genctl.events import Event, Loading, Stepped
from genctl.terminal import loading_line, theme, widgets
from genctl.terminal.console import takes_lines
from genctl.terminal.live_region import FRAME_S, DrawnLines, RareLines

ROWS_FRAME_S = 0.1  # seconds between two drawings of rows
BAR = 20  # columns
SPEED_S = 20.0  # the speed shown is that of the last so many seconds


class TransientBars:
    """Bars that are drawn by `draw` alone, without a thread, and erased in full even if the window became narrower.

    A terminal that cannot redraw gets a line now and then instead. `clock` gives seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float], *columns: ProgressColumn) -> None:
        self._console, self._clock, self._columns = console, clock, columns
        self._progress: Progress | None = None
        self._tasks: dict[object, TaskID] = {}
        self._lines = DrawnLines(console)
        self._drawn = float("-inf")
        self._rare = RareLines(clock) if takes_lines(console) else None

    def is_due(self, frame_s: float, key: object, *, complete: bool = False) -> bool:
        """Whether to draw the bar `key`: if it is new or complete, or the last frame is so many seconds old.

        For a terminal that gets lines, whether one is due.
        """
        if self._rare is not None:
            return self._rare.is_due()
        old = self._clock() - self._drawn >= frame_s
        return self._console.is_interactive and (old or complete or key not in self._tasks)

    def draw(self, key: object, words: str, done: float, total: float | None, amount: str = "") -> None:
        """Draw the bar `key` with `words` and an `amount` beside it, or print these."""
        if self._rare is not None:
            self._console.print(Text(f"{words}: {amount}" if amount else words))
            return
        if self._lines.outdated:
            self.erase()
        if self._progress is None:
            loading_line.clear()  # it stands where the bars begin
            self._progress = Progress(
                *self._columns,
                console=self._console,
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._progress.start()
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(words, total=total, amount=amount)
        self._progress.update(self._tasks[key], description=words, completed=done, total=total, amount=amount)
        self._progress.refresh()
        lines = self._console.render_lines(self._progress.get_renderable(), pad=False)
        self._lines.note([Segment.get_line_length(line) for line in lines])
        self._drawn = self._clock()

    def erase(self) -> None:
        """Erase the bars; `draw` starts them again."""
        if self._progress is not None:
            self._lines.clear()
            self._progress.stop()
            self._progress, self._tasks = None, {}
            self._drawn = float("-inf")


class RowsBar:
    """Draws how many of `total` rows are done (None: unknown); `what` they are called.

    `done` rows were finished before this run. Nothing is drawn in a pipe. Redrawn on events, at most ten times a
    second.
    """

    def __init__(
        self,
        console: Console,
        total: int | None,
        *,
        done: int = 0,
        what: str = "rows",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        words = TextColumn(
            "{task.description}",
            style=theme.DIM,
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis"),
        )
        self._bars = TransientBars(console, clock, *([] if total is None else [BarColumn(bar_width=BAR)]), words)
        self._total, self._what = total, what
        self._done = self._before = done
        self._failed = 0
        self._ahead = 0  # rows that are finished and not written yet
        self._speeds: tuple[float, ...] = ()
        self._tokens = 0
        self._clock = clock
        self._began = clock()
        self._window: list[tuple[float, int]] = [(self._began, 0)]  # when so many tokens were written
        self._closed = False

    def feed(self, event: Event) -> None:
        """Count the tokens of a step. Other events only draw it."""
        if isinstance(event, Stepped):
            self._tokens += event.new_tokens
        self._draw()

    def work(self, rows: int, tokens: int, speeds: Sequence[float] = ()) -> None:
        """What workers have done: rows that are finished and not written yet, all tokens; tokens a second of each."""
        self._ahead, self._tokens, self._speeds = rows, tokens, tuple(speeds)
        self._draw()

    def row(self, *, failed: bool = False) -> None:
        """Count one more row."""
        self._done += 1
        self._ahead = max(self._ahead - 1, 0)
        self._failed += int(failed)
        self._draw()

    def hide(self) -> None:
        """Erase the bar; the next event draws it again."""
        self._bars.erase()

    def close(self) -> None:
        """Erase the bar for good."""
        self.hide()
        self._closed = True

    def line(self) -> str:
        """The words beside the bar."""
        total = f"/{self._total:,}" if self._total is not None else ""
        finished = self._done + self._ahead
        words = [f"{finished:,}{total} {self._what}"]
        if self._failed:
            words.append(f"{self._failed:,} failed")
        since, tokens = self._window[0]
        now = self._clock()
        if now > since and self._tokens > tokens:
            words.append(widgets.token_rate((self._tokens - tokens) / (now - since)))
        done = finished - self._before
        if self._total is not None and done:
            left = max(self._total - finished, 0) * (now - self._began) / done
            words.append(f"{_duration(left)} left")
        if self._speeds:
            words.append(f"by worker: {', '.join(f'{speed:,.0f}' for speed in self._speeds)}")
        return " · ".join(words)

    def _draw(self) -> None:
        if self._closed or not self._bars.is_due(ROWS_FRAME_S, "rows"):
            return
        now = self._clock()
        if self._tokens != self._window[-1][1]:  # workers report their rows once in a while
            self._window.append((now, self._tokens))
        while len(self._window) > 2 and now - self._window[1][0] > SPEED_S:
            del self._window[0]
        self._bars.draw("rows", self.line(), self._done + self._ahead, self._total)


def _duration(seconds: float) -> str:
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


# -- downloading and reading a checkpoint: erased when it is done ------------------------------------------------------


class LoadingBar:
    """Draws `Loading` events: at most every 50 ms, and whenever a part is complete. Nothing is drawn in a pipe."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._bars: TransientBars | None = None  # made with the first event
        self._lock = threading.Lock()  # files are downloaded by several threads

    def takes(self, event: Event, *, quiet: bool) -> bool:
        """Whether an event is one of loading: it is drawn unless `quiet`. Any other event ends the bar."""
        if not isinstance(event, Loading):
            self.close()
            return False
        if not quiet:
            self.show(event)
        return True

    def show(self, event: Loading) -> None:
        """Update the bar."""
        part = event.what, event.unit
        with self._lock:
            if self._bars is None:
                words_column = TextColumn("{task.description}", markup=False)
                amount_column = TextColumn("{task.fields[amount]}", markup=False, style=theme.DIM)
                self._bars = TransientBars(
                    self._console, self._clock, words_column, _KnownBar(bar_width=24), amount_column
                )
            if self._bars.is_due(FRAME_S, part, complete=event.done >= event.total):
                verb = "downloading" if event.unit == "B" else "reading"
                words = f"{verb} {widgets.visible(event.what)}"
                if self._console.is_interactive:
                    words = widgets.first_words(words, max(self._console.width - 44, 16))
                if event.unit == "B":
                    amount = size(event.done, of=event.total)
                else:
                    amount = f"{event.done:,}{f'/{event.total:,}' if event.total else ''} {event.unit}"
                self._bars.draw(part, words, event.done, event.total or None, amount)

    def close(self) -> None:
        """Erase the bar."""
        if self._bars is not None:
            self._bars.erase()


class _KnownBar(BarColumn):
    """A bar; nothing while the total is not known, where Rich draws a full one."""

    def render(self, task: Task) -> ProgressBar:
        bar = super().render(task)
        bar.width = 0 if task.total is None else self.bar_width
        return bar

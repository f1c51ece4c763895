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
from rich.text import Text

from genctl.errors import size
from genctl.events import Event, Loading, Stepped
from genctl.terminal import theme, widgets
from genctl.terminal.console import takes_lines
from genctl.terminal.live_region import FRAME_S, DrawnLines, RareLines, transient_progress

ROWS_FRAME_S = 0.1  # seconds between two drawings of rows
BAR = 20  # columns
SPEED_S = 20.0  # the speed shown is that of the last so many seconds


class RowsBar:
    """Draws how many of `total` rows are done (None: unknown); `what` they are called.

    `done` rows were finished before this run. Nothing is drawn in a pipe. Redrawn on events, at most ten times a
    second; there is no thread.
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
        self._console = console
        self._total, self._what = total, what
        self._rare = RareLines(clock) if takes_lines(console) else None
        self._done = self._before = done
        self._failed = 0
        self._ahead = 0  # rows that are finished and not written yet
        self._speeds: tuple[float, ...] = ()
        self._tokens = 0
        self._clock = clock
        self._began = clock()
        self._window: list[tuple[float, int]] = [(self._began, 0)]  # when so many tokens were written
        self._drawn = float("-inf")
        self._progress: Progress | None = None
        self._row = DrawnLines(console)
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
        if self._progress is not None:
            progress, self._progress = self._progress, None
            self._row.clear()
            progress.stop()
            self._drawn = float("-inf")

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
            rate = (self._tokens - tokens) / (now - since)
            words.append(f"{rate:,.0f} tok/s" if rate >= 10 else f"{rate:.1f} tok/s")
        done = finished - self._before
        if self._total is not None and done:
            left = max(self._total - finished, 0) * (now - self._began) / done
            words.append(f"{_duration(left)} left")
        if self._speeds:
            words.append(f"by worker: {', '.join(f'{speed:,.0f}' for speed in self._speeds)}")
        return " · ".join(words)

    def _draw(self) -> None:
        now = self._clock()
        if self._rare is not None and not self._closed and self._rare.is_due():
            self._console.print(Text(self.line()))
        if self._closed or not self._console.is_interactive or now - self._drawn < ROWS_FRAME_S:
            return
        if self._tokens != self._window[-1][1]:  # workers tell of their rows once in a while
            self._window.append((now, self._tokens))
        while len(self._window) > 2 and now - self._window[1][0] > SPEED_S:
            del self._window[0]
        if self._row.outdated:
            self.hide()
        if self._progress is None:
            bar = [] if self._total is None else [BarColumn(bar_width=BAR)]
            self._progress = transient_progress(self._console, *bar, _Line(self.line))
            self._progress.add_task("", total=self._total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=self._done + self._ahead)
        self._progress.refresh()
        room = 0 if self._total is None else BAR + 1
        self._row.note([min(room + len(self.line()), self._console.width)])
        self._drawn = self._clock()


class _Line(ProgressColumn):
    max_refresh = None

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__()
        self._line = line

    def render(self, task: Task) -> Text:
        return Text(self._line(), style=theme.DIM, no_wrap=True, overflow="ellipsis")


def _duration(seconds: float) -> str:
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


# -- downloading and reading a checkpoint: erased when it is done ------------------------------------------------------


class LoadingBar:
    """Draws `Loading` events. Nothing is drawn if the console is not interactive."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._progress: Progress | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._drawn = float("-inf")
        self._lines = DrawnLines(console)
        self._takes_lines = takes_lines(console)
        self._rare: RareLines | None = None  # made with the first event
        self._lock = threading.Lock()  # files are downloaded by several threads

    def takes(self, event: Event, *, quiet: bool) -> bool:
        """Whether an event tells of loading: it is drawn unless `quiet`. Any other event ends the bar."""
        if not isinstance(event, Loading):
            self.close()
            return False
        if not quiet:
            self.show(event)
        return True

    def show(self, event: Loading) -> None:
        """Update the bar; redraws at most every 50 ms, and whenever a part is complete."""
        if self._console.is_interactive or self._takes_lines:
            with self._lock:
                (self._print if self._takes_lines else self._show)(event)

    def _print(self, event: Loading) -> None:
        self._rare = self._rare or RareLines(self._clock)
        if self._rare.is_due():
            self._console.print(Text(f"{_words(event)}: {_amount(event.done, event.total, event.unit)}"))

    def _show(self, event: Loading) -> None:
        if self._lines.outdated:
            self.close()
        if self._progress is None:
            self._progress = transient_progress(
                self._console, TextColumn("{task.description}", markup=False), _KnownBar(bar_width=24), _Amount()
            )
            self._progress.start()
        part = (event.what, event.unit)
        if part not in self._tasks:
            description = widgets.first_words(_words(event), max(self._console.width - 44, 16))
            self._tasks[part] = self._progress.add_task(
                description, total=event.total or None, completed=event.done, unit=event.unit
            )
        self._progress.update(self._tasks[part], completed=event.done, total=event.total or None)
        if self._clock() - self._drawn >= FRAME_S or event.done >= event.total:
            self._progress.refresh()
            drawn = self._console.render_lines(self._progress.get_renderable(), pad=False)
            self._lines.note([Segment.get_line_length(line) for line in drawn])
            self._drawn = self._clock()

    def close(self) -> None:
        """Erase the bar."""
        if self._progress is not None:
            self._lines.clear()
            self._progress.stop()
            self._progress = None
            self._tasks = {}
            self._drawn = float("-inf")


class _KnownBar(BarColumn):
    """A bar; nothing while the total is not known, where Rich draws a full one."""

    def render(self, task: Task) -> ProgressBar:
        bar = super().render(task)
        bar.width = 0 if task.total is None else self.bar_width
        return bar


class _Amount(ProgressColumn):
    """How much of how much, in the event's own unit."""

    def render(self, task: Task) -> Text:
        return Text(_amount(task.completed, task.total, task.fields["unit"]), style=theme.DIM)


def _words(event: Loading) -> str:
    return f"{'downloading' if event.unit == 'B' else 'reading'} {widgets.visible(event.what)}"


def _amount(done: float, total: float | None, unit: str) -> str:
    """How much of how much."""
    if unit == "B":
        return size(done, of=total or 0)
    return f"{done:,.0f}{f'/{total:,.0f}' if total else ''} {unit}"

"""The lines at the bottom of the screen that are redrawn in place during a run, and erased at its end.

`LiveRegion` draws lines. `RowsBar` draws the progress of a batch, and `LoadingBar` that of downloading and reading a
checkpoint: only on a terminal that can redraw. Without a total there is no bar, only the words.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from genctl.errors import size
from genctl.events import Event, Loading, Stepped
from genctl.terminal import loading_line, theme, widgets

FRAME_S = 0.05
# Rich redraws only on request, and does not redirect what other code prints
REDRAWN: dict[str, Any] = {"transient": True, "auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}


class LiveRegion:
    """Lines that are drawn again and again until `hide` erases them. `clock` gives seconds."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._drawn = float("-inf")

    @property
    def visible(self) -> bool:
        """Whether anything is on the screen."""
        return self._live is not None

    def is_due(self, now: float) -> bool:
        """Whether the last frame is old enough for the next one."""
        return now - self._drawn >= FRAME_S

    def draw(self, lines: Sequence[Text]) -> None:
        """Replace what is drawn by `lines`."""
        if self._live is None:
            loading_line.end()  # it stands where the region begins
            self._live = Live(console=self._console, vertical_overflow="crop", **REDRAWN)
            self._live.start()
        self._live.update(Group(*lines), refresh=True)
        self._drawn = self._clock()  # after drawing, so that a slow terminal does not take more than its share

    def hide(self) -> None:
        """Erase the region; the next `draw` starts it again."""
        if self._live is not None:
            live, self._live = self._live, None
            live.update(Text(""))
            live.stop()
            self._drawn = float("-inf")


ROWS_FRAME_S = 0.1  # seconds between two drawings of rows
BAR = 20  # columns


class TransientBars:
    """Rich's bars without its thread: only `draw` draws them, and `erase` erases them. `clock` gives seconds."""

    def __init__(self, console: Console, clock: Callable[[], float], *columns: ProgressColumn) -> None:
        self._console, self._clock, self._columns = console, clock, columns
        self._progress: Progress | None = None
        self._tasks: dict[object, TaskID] = {}
        self._drawn = float("-inf")

    def is_due(self, frame_s: float, key: object, *, complete: bool = False) -> bool:
        """Whether to draw the bar `key`: if it is new or complete, or the last frame is `frame_s` seconds old."""
        old = self._clock() - self._drawn >= frame_s
        return self._console.is_interactive and (old or complete or key not in self._tasks)

    def draw(self, key: object, words: str, done: float, total: float | None, amount: str = "") -> None:
        """Draw the bar `key` with `words` and an `amount` beside it."""
        if self._progress is None:
            loading_line.clear()  # it stands where the bars begin
            self._progress = Progress(*self._columns, console=self._console, **REDRAWN)
            self._progress.start()
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(words, total=total, amount=amount)
        self._progress.update(self._tasks[key], description=words, completed=done, total=total, amount=amount)
        self._progress.refresh()
        self._drawn = self._clock()

    def erase(self) -> None:
        """Erase the bars; `draw` starts them again."""
        if self._progress is not None:
            self._progress.stop()
            self._progress, self._tasks, self._drawn = None, {}, float("-inf")


class RowsBar:
    """Draws how many of `total` rows (None: unknown) are done; `what` is their name.

    `done` rows were finished before this run. Redrawn on events, at most ten times a second.
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
        narrow = Column(no_wrap=True, overflow="ellipsis")
        words = TextColumn("{task.description}", style=theme.DIM, markup=False, table_column=narrow)
        self._bars = TransientBars(console, clock, *([] if total is None else [BarColumn(bar_width=BAR)]), words)
        self._total, self._what = total, what
        self._done = self._before = done
        self._failed = 0
        self._tokens = 0
        self._clock, self._began = clock, clock()
        self._closed = False

    def feed(self, event: Event) -> None:
        """Count the tokens of a step. Other events only draw it."""
        if isinstance(event, Stepped):
            self._tokens += event.new_tokens
        self.draw()

    def add(self, tokens: int) -> None:
        """Count the tokens of a result whose steps were no events."""
        self._tokens += tokens

    def row(self, *, failed: bool = False) -> None:
        """Count one more row."""
        self._done += 1
        self._failed += int(failed)
        self.draw()

    def hide(self) -> None:
        """Erase the bar; the next event draws it again."""
        self._bars.erase()

    def close(self) -> None:
        """Erase the bar for good."""
        self.hide()
        self._closed = True

    def line(self) -> str:
        """The words beside the bar."""
        seconds = self._clock() - self._began
        words = [f"{self._done:,}{'' if self._total is None else f'/{self._total:,}'} {self._what}"]
        if self._failed:
            words.append(f"{self._failed:,} failed")
        if seconds > 0 and self._tokens:
            words.append(widgets.token_rate(self._tokens / seconds))
        done = self._done - self._before
        if self._total is not None and done:
            left = max(self._total - self._done, 0) * seconds / done
            words.append(f"{timedelta(seconds=round(left))} left")
        return " · ".join(words)

    def draw(self) -> None:
        """Draw it, if the last frame is old enough."""
        if not self._closed and self._bars.is_due(ROWS_FRAME_S, "rows"):
            self._bars.draw("rows", self.line(), self._done, self._total)


class LoadingBar:
    """Draws `Loading` events: at most every 50 ms, and whenever a part is complete."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        amount = TextColumn("{task.fields[amount]}", markup=False, style=theme.DIM)
        words = TextColumn("{task.description}", markup=False)
        self._bars = TransientBars(console, clock, words, BarColumn(bar_width=24), amount)
        self._lock = threading.Lock()  # files are downloaded by several threads

    def takes(self, event: Event, *, quiet: bool) -> bool:
        """Whether this is a `Loading` event, which is drawn unless `quiet`. Any other event closes the bar."""
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
            if not self._bars.is_due(FRAME_S, part, complete=event.done >= event.total):
                return
            verb, amount = "reading", f"{event.done:,}{f'/{event.total:,}' if event.total else ''} {event.unit}"
            if event.unit == "B":
                verb, amount = "downloading", size(event.done, of=event.total)
            words = widgets.first_words(f"{verb} {widgets.visible(event.what)}", max(self._console.width - 44, 16))
            self._bars.draw(part, words, event.done, event.total or None, amount)

    def close(self) -> None:
        """Erase the bar."""
        self._bars.erase()

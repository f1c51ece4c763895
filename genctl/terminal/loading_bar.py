"""The progress bar of downloading and reading a checkpoint. Only on a terminal, erased when done.

A dumb terminal gets a line now and then, more and more rarely.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.text import Text

from genctl.errors import size
from genctl.events import Loading
from genctl.terminal import theme, widgets
from genctl.terminal.console import takes_lines
from genctl.terminal.live_region import FRAME_S, DrawnLines, RareLines, transient_progress


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

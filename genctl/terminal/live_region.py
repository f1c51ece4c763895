"""Lines at the bottom of the screen that are redrawn in place while a run goes on."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from genctl.terminal import loading_line
from genctl.terminal.rewrapping import rows, wraps

# -- erase drawn lines correctly after the window became narrower, where the terminal wraps them (`rewrapping`) --------


class DrawnLines:
    """The widths of the lines on the screen, for erasing all their rows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = 0
        self._cells: list[int] = []

    def note(self, cells: Sequence[int]) -> None:
        """Note that lines of these widths are on the screen, with the cursor in the last one."""
        self._width, self._cells = self._console.width, list(cells)

    @property
    def outdated(self) -> bool:
        """Whether the window's width changed since they were drawn."""
        return bool(self._cells) and self._console.width != self._width

    def clear(self) -> None:
        """Erase the additional rows of rewrapped lines. Rich erases one row per line."""
        width = self._console.width
        more = sum(rows(cells, width) for cells in self._cells) - len(self._cells)
        self._cells = []
        if more > 0 and wraps():
            up = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * more
            self._console.control(Control(ControlType.CARRIAGE_RETURN, *up))


FRAME_S = 0.05
V = TypeVar("V", bound="ErasedView")


class ErasedView(ABC):
    """A view that is erased at the end of a `with` block."""

    @abstractmethod
    def hide(self) -> None:
        """Erase the live region and every bar."""

    def __enter__(self: V) -> V:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with contextlib.suppress(OSError) if isinstance(error, OSError) else contextlib.nullcontext():
            self.hide()


class LiveRegion:
    """Lines that are drawn again and again until `hide` erases them. `clock` gives seconds."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._lines = DrawnLines(console)
        self._drawn = float("-inf")

    @property
    def visible(self) -> bool:
        """Whether anything is on the screen."""
        return self._live is not None

    def is_due(self, now: float) -> bool:
        """Whether the last frame is old enough for the next one."""
        return now - self._drawn >= FRAME_S

    def draw(self, lines: Sequence[Text], settled: Sequence[Text] = ()) -> None:
        """Replace what is drawn by `lines`. The `settled` lines are printed above it and stay."""
        if self._lines.outdated:
            self.hide()
        if self._live is None:
            loading_line.end()  # it stands where the region begins
            for line in settled:
                self._console.print(line)
            settled = ()
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._live.start()
        self._live.update(Group(*lines), refresh=not settled)
        if settled:
            self._console.print(Group(*settled))  # this redraws the region too
        self._lines.note([line.cell_len for line in lines])
        self._drawn = self._clock()  # after drawing, so that a slow terminal does not take more than its share

    def hide(self) -> None:
        """Erase the region; the next `draw` starts it again."""
        if self._live is not None:
            live, self._live = self._live, None
            self._lines.clear()
            live.update(Text(""))
            live.stop()
            self._drawn = float("-inf")


LINE_S = 10.0  # until the first line


class RareLines:
    """When a terminal that cannot redraw gets a line: each pause is twice the one before."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began, self._pause = clock, clock(), LINE_S

    def is_due(self) -> bool:
        """Whether to print one now."""
        spent = self._clock() - self._began
        due = spent >= self._pause
        self._pause = 2 * spent if due else self._pause
        return due

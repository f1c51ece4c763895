"""Lines at the bottom of the screen that are redrawn in place while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from genctl.terminal import loading_line

FRAME_S = 0.05


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
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
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

"""One line for each pair of sides, while they are compared."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from genctl.commands.parity.view import nats, verdict_style
from genctl.errors import count
from genctl.parity.values import Parity, Position
from genctl.terminal import theme, widgets
from genctl.terminal.console import takes_lines
from genctl.terminal.live_region import LiveRegion, RareLines

_STAGES = {
    "writing": "texts are written",
    "reading": "both sides read",
    "noise": "measuring noise",
    "recording": "recording the reference",
    "scoring": "texts are scored",
    "layers": "looking for the layer",
}


class LivePairs:
    """Draws the pairs: finished ones with their verdict, the current one with its progress. `clock` gives seconds."""

    def __init__(self, console: Console, clock: Callable[[], float], *, quiet: bool) -> None:
        self._console, self._clock = console, clock
        self._draws = console.is_interactive and not quiet
        self._rare = RareLines(clock) if takes_lines(console) and not quiet else None
        self._region = LiveRegion(console, clock)
        self._finished: list[Text] = []
        self._name = self._stage = ""
        self._positions, self._kl = 0, 0.0

    def begin(self, name: str) -> None:
        """A pair follows."""
        self._name, self._stage, self._positions, self._kl = name, "", 0, 0.0
        self._show(at_once=True)

    def stage(self, stage: str) -> None:
        """What begins now, as `measure` says it."""
        self._stage = _STAGES.get(stage, stage)
        self._show(at_once=True)

    def position(self, position: Position) -> None:
        """One more position is compared."""
        self._positions += 1
        self._kl += position.kl
        self._show()

    def end(self, one: Parity) -> None:
        """The pair is compared."""
        line = Text(f"{widgets.visible(one.other)}: ").append(one.word, style=verdict_style(one.verdict))
        self._finished.append(line.append(f" · KL {nats(one.summary.kl.mean)} nats", style=theme.DIM))

    def hide(self) -> None:
        """Erase what is drawn."""
        self._region.hide()

    def _line(self) -> Text:
        words = [f"{widgets.visible(self._name)}: {self._stage}".rstrip(": ")]
        if self._positions:
            words.append(count(self._positions, "position"))
            words.append(f"KL {nats(self._kl / self._positions)} nats")
        return Text(" · ".join(words), style=theme.DIM)

    def _show(self, *, at_once: bool = False) -> None:
        if self._rare is not None and self._rare.is_due():
            self._console.print(self._line())
        if self._draws and (at_once or self._region.is_due(self._clock())):
            room = max(self._console.height - 2, 1)
            lines = [*self._finished, self._line()][-room:]
            self._region.draw([widgets.fit(line.copy(), self._console.width) for line in lines])

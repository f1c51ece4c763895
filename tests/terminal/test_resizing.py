"""What is left of a view after the window was made narrower and wider: the view, once, and what stood above it."""

from __future__ import annotations

import pytest
from rich.text import Text

from genctl.commands.compare.view import Column, CompareView
from genctl.commands.run.run_view import RunView
from genctl.events import Loading
from genctl.terminal import loading_line
from genctl.terminal.live_region import LiveRegion
from genctl.terminal.progress_bars import LoadingBar, RowsBar
from tests.terminal.beams import search
from tests.terminal.reflowing import ReflowingTerminal
from tests.terminal.streams import STORY, Clock, console, lane, written

ABOVE = ["$ a command with a line that is longer than a narrow window would be able to show in a single row", "above"]


class Window:
    """A console on a terminal that rewraps, with two lines above."""

    def __init__(self, width: int) -> None:
        self.terminal = ReflowingTerminal(width)
        self.terminal.feed("\n".join(ABOVE) + "\n")
        self.console = console(width, 24, terminal=True)
        self._read = 0

    def resize(self, width: int) -> None:
        self.paragraphs()
        self.terminal.resize(width)
        self.console.size = type(self.console.size)(width, 24)

    def paragraphs(self) -> list[str]:
        """What is below the two lines."""
        text = written(self.console)
        self.terminal.feed(text[self._read :])
        self._read = len(text)
        assert self.terminal.paragraphs[:2] == ABOVE
        return [line.rstrip() for line in self.terminal.paragraphs[2:] if line.strip()]


@pytest.fixture(autouse=True)
def _wrapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTE_VERSION", "7600")


@pytest.mark.parametrize("widths", [(80, 50, 110), (120, 60, 130), (80, 79, 40, 80)])
def test_a_region_is_redrawn_without_a_trace(widths: tuple[int, ...]) -> None:
    window = Window(widths[0])
    region = LiveRegion(window.console, Clock())
    for width in widths:
        window.resize(width)
        lines = [str(number) * (width - number) for number in range(4)]
        for _ in range(2):
            region.draw([Text(line, no_wrap=True) for line in lines])
        assert window.paragraphs() == lines
    region.hide()
    assert window.paragraphs() == []


@pytest.mark.parametrize("widths", [(80, 50, 110), (120, 60, 130)])
def test_a_loading_bar_is_redrawn_without_a_trace(widths: tuple[int, ...]) -> None:
    window, clock = Window(widths[0]), Clock()
    bar = LoadingBar(window.console, clock)
    for done, width in enumerate(widths, 1):
        window.resize(width)
        for what in ("a file with a long name that fills the line of a window", "another file"):
            clock.now += 1
            bar.show(Loading(what, done, 9))
        assert [line.split()[0] for line in window.paragraphs()] == ["downloading"] * 2
    bar.close()
    assert window.paragraphs() == []


def test_a_bar_of_rows_is_redrawn_without_a_trace() -> None:
    window, clock = Window(80), Clock()
    bar = RowsBar(window.console, 9, clock=clock)
    for width in (80, 30, 110):
        window.resize(width)
        clock.now += 1
        bar.row()
        assert len(window.paragraphs()) == 1
    bar.close()
    assert window.paragraphs() == []


@pytest.mark.parametrize("widths", [(80, 50, 110), (120, 60, 130)])
def test_a_comparison_is_redrawn_without_a_trace(widths: tuple[int, ...]) -> None:
    window, clock = Window(widths[0]), Clock()
    columns = [Column(name, (f"{name}/0/7",)) for name in ("a", "b")]
    with CompareView(window.console, console(80), live=True, clock=clock) as view:
        view.begin(Text("Under the old oak"), columns)
        events = [*lane("a/0/7", [STORY]), *lane("b/0/7", [STORY])]
        for number, event in enumerate(events):
            if number % 20 == 19:
                window.resize(widths[number // 20 % len(widths)])
            clock.now += 0.1
            view.feed(event)
            assert window.paragraphs().count("Under the old oak") <= 1
    assert window.paragraphs() == []


@pytest.mark.parametrize("widths", [(80, 50, 110), (120, 60, 130)])
def test_beams_are_redrawn_without_a_trace(widths: tuple[int, ...]) -> None:
    window, clock = Window(widths[0]), Clock()
    with RunView(window.console, console(80), echo=True, clock=clock, beams=True) as view:
        for number, event in enumerate(search()):
            if number % 4 == 3:
                window.resize(widths[number // 4 % len(widths)])
            clock.now += 0.1
            view.feed(event)
            heads = [line for line in window.paragraphs() if line.startswith("rank  from")]
            assert len(heads) <= 1


def test_the_line_before_loading_is_redrawn_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    window = ReflowingTerminal(80)
    window.feed("above\n")
    monkeypatch.setattr(loading_line.os, "dup", lambda number: number)
    monkeypatch.setattr(loading_line.os, "write", lambda number, text: window.feed(text.decode()))
    monkeypatch.setattr(
        loading_line.os, "get_terminal_size", lambda number: loading_line.os.terminal_size((window.width, 24))
    )
    sign = loading_line._Line("loading " + "a" * 90, plain=False)
    for width in (80, 30, 110):
        window.resize(width)
        sign.draw()
        assert len([line for line in window.paragraphs if line.strip()]) == 2
    window.resize(20)
    sign.hide()
    assert [line for line in window.paragraphs if line.strip()] == ["above"]

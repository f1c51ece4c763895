"""`--svg`: what a terminal shows when a run is done, as a picture."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from genctl.commands.file_at_end import FileAtEnd
from genctl.commands.page_file import repeating
from genctl.commands.watcher import Watcher
from genctl.events import Event
from genctl.terminal.screen_picture import picture, terminal

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.engines.protocol import Engine

WIDTH = 100  # cells, where there is no terminal to be as wide as


class View(Protocol):
    """What a command draws with on the picture's console."""

    load_s: float

    def feed(self, event: Event, /) -> None:
        """Take one event."""

    def close(self) -> None:
        """Draw what is left."""


class ScreenFile(FileAtEnd, Watcher):
    """A picture in the making: it shows what is printed on `console`."""

    def __init__(self, path: str, *, force: bool) -> None:
        super().__init__(path, force=force)
        self.console = terminal(shutil.get_terminal_size((WIDTH, 24)).columns)
        self._view: View | None = None
        self._load_s = 0.0

    def feed(self, event: Event) -> None:
        """Take one event."""
        if self._view is not None:
            self._view.feed(event)

    def loaded(self, engine: Engine, load_s: float) -> None:
        """Keep how long it took."""
        self._load_s = load_s

    def draw(self, draw: Callable[[Console], Any]) -> None:
        """Let a command draw on the console."""
        self._view = draw(self.console)

    def content(self) -> bytes:
        """The picture."""
        if self._view is not None:
            self._view.load_s = self._load_s
            self._view.close()
        title, command = "genctl " + " ".join(sys.argv[1:2]), repeating(sys.argv[1:])
        return picture(self.console, title, command).encode("utf-8", "replace")

"""`--svg`: what a terminal shows when a run is done, as a picture."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable

from genctl.cli.file_at_end import FileAtEnd
from genctl.render.screen_picture import picture, terminal

WIDTH = 100  # cells, where there is no terminal to be as wide as


class ScreenFile(FileAtEnd):
    """A picture in the making: it shows what is printed on `console`. `close` is called before it is drawn."""

    def __init__(self, path: str, *, force: bool) -> None:
        super().__init__(path, force=force)
        self.console = terminal(shutil.get_terminal_size((WIDTH, 24)).columns)
        self.close: Callable[[], object] = lambda: None

    def content(self) -> bytes:
        """The picture."""
        self.close()
        return picture(self.console, "genctl " + " ".join(sys.argv[1:2])).encode("utf-8", "replace")

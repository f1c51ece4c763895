"""`--svg`: what a terminal shows when a run is done, as a picture."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from types import TracebackType

from genctl.batch import writers
from genctl.render.screen_picture import picture, terminal

WIDTH = 100  # cells, where there is no terminal to be as wide as


class ScreenFile:
    """A picture in the making. As a context it is opened as --output is, and drawn at the end unless an error comes.

    What is printed on `console` is what the picture shows. `close` is called first of all in the end.
    """

    def __init__(self, path: str, *, force: bool) -> None:
        self.sink = writers.open_output(path, None, force=force, at_once=True)
        self.console = terminal(shutil.get_terminal_size((WIDTH, 24)).columns)
        self.close: Callable[[], object] = lambda: None

    def __enter__(self) -> ScreenFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.sink.abandon()
            return
        self.close()
        self.sink.write(picture(self.console, "genctl " + " ".join(sys.argv[1:2])).encode("utf-8", "replace"))
        self.sink.close()

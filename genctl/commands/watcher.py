"""What follows a run besides its output: the page of --report, the picture of --svg."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from genctl.events import Event
from genctl.io import writers

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.engines.protocol import Engine


Self = TypeVar("Self", bound="FileAtEnd")


class FileAtEnd(ABC):
    """A context that is opened as --output is, and written at the end unless an error comes."""

    def __init__(self, path: str, *, force: bool) -> None:
        self._sink = writers.open_output(path, None, force=force, at_once=True)

    @abstractmethod
    def content(self) -> bytes:
        """The whole file."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._sink.abandon()
            return
        try:
            self._sink.write(self.content())
            self._sink.close()
        finally:
            self._sink.abandon()  # does nothing to what is closed


class Watcher:
    """A listener that is told more than events. What it has no use for, it leaves out."""

    def feed(self, event: Event) -> None:
        """Take one event."""

    def loaded(self, engine: Engine, load_s: float) -> None:
        """Take an engine that was loaded; `load_s` seconds were spent with that so far."""

    def settled(
        self,
        job: str,
        *,
        seed: int | None = None,
        baseline: str | None = None,
        cache: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the settings as TOML; the seed, the baseline of a comparison, or the report of a cache."""

    def failed(self, id: str, code: str, message: str) -> None:
        """Take a row that failed, if no event says so."""

    def figures(self, lane: str, figures: dict[str, Any]) -> None:
        """Take more numbers of a lane."""

    def draw(self, draw: Callable[[Console], Any]) -> None:
        """Let a command draw on a console, as on a terminal; a view that is returned receives the events."""

"""Files that are written when a run ends: the page of --report, the picture of --svg."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

from genctl.io import writers

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

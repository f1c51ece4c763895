"""A view that shows nothing, without Rich, whose import takes time."""

from __future__ import annotations

from types import TracebackType
from typing import IO

from genctl.events import Event


class SilentView:
    """Takes the place of a `RunView`."""

    load_s: float | None = None

    def feed(self, event: Event) -> None:
        """Ignore the event."""

    def begin(self) -> None:
        """Do nothing."""

    def pause(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> SilentView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


def never_fail_to_encode(stream: IO[str]) -> None:
    """Let a stream escape the characters that its encoding lacks, instead of raising."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None and getattr(stream, "errors", None) == "strict":
        reconfigure(errors="backslashreplace")

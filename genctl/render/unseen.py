"""A run of which nothing is shown beside the texts that it writes: without Rich, whose import takes time."""

from __future__ import annotations

from types import TracebackType
from typing import IO

from genctl.events import Event


class Unseen:
    """Stands where a `RunView` would."""

    def feed(self, event: Event) -> None:
        """Show nothing."""

    def pause(self) -> None:
        """Nothing moves."""

    def close(self) -> None:
        """Nothing is left to show."""

    def __enter__(self) -> Unseen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing was begun."""


def never_fail_to_encode(stream: IO[str]) -> None:
    """A terminal in a narrow encoding shows an escape where it lacks the character; it is no reason to fall over."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None and getattr(stream, "errors", None) == "strict":
        reconfigure(errors="backslashreplace")

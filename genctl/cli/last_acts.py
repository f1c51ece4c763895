"""What is done immediately before a signal ends the process (`os._exit`), when nothing else can happen any more."""

from __future__ import annotations

from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

acts: list[Callable[[], object]] = []


def perform() -> None:
    """Do it, once, whatever becomes of each."""
    while acts:
        with suppress(Exception):
            acts.pop()()

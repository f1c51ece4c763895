"""What a job says on standard error of compiling: it takes long, and not every step can be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genctl.session import Session


def announce(
    session: Session, say: Callable[[str], None], *, quiet: bool, before: Callable[[], None] = lambda: None
) -> None:
    """Have what compiling has to tell said as notes, or with `quiet` not at all.

    It is told in the middle of a step: `before` takes away what moves on the terminal.
    """
    compiled = session.forward.compiled
    if compiled is None:
        return

    def note(line: str) -> None:
        if not quiet:
            before()
            say(f"note: {line}")

    compiled.say = note

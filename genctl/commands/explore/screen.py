"""The full screen of `genctl explore`, from the terminal to the exit status. Enter by `run_screen`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING

from genctl.errors import GenctlError

if TYPE_CHECKING:
    from genctl.commands.explore.screen_source import TreeSource

POLL_S = 0.1  # how often a signal is looked for


def run_screen(
    source: TreeSource,
    *,
    saved: str = "",
    coloured: bool = True,
    signalled: Callable[[], int] = lambda: 0,
    resume: bool = False,
) -> int:
    """Show a tree until the person leaves. Returns the exit status.

    `saved` is the file of the tree, which the last line names. `signalled` is the status to exit with once a signal has
    come, else 0; whoever calls handles signals. `resume` finishes the command that was cut short. Raises GenctlError
    after the terminal is restored, if the screen itself fails.
    """
    from genctl.commands.explore.screen_app import ExploreApp
    from genctl.terminal.message import print_message

    app = ExploreApp(source, coloured=coloured)
    errors = app.capture_errors()
    app.watch_signals(signalled, POLL_S)
    if resume:
        app.first_command = "resume"
    status = app.run()
    app.worker.close()
    if saved:
        command = f"genctl explore --open {shlex.quote(saved)}"
        print_message(f"saved: {command} continues this tree", whole=command)
    if app.return_code:
        told = errors.getvalue()
        last = next(iter(re.findall(r"^\w+(?:Error|Exception|Exit|Matches)\b.*$", told, re.MULTILINE)), "no message")
        raise ScreenError(f"the screen failed: {last}", hint="this is a bug; --debug shows where") from RuntimeError(
            told
        )
    return signalled() or int(status or 0)


class ScreenError(GenctlError):
    """The screen failed, not the model."""

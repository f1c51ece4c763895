"""What can go wrong with a server."""

from __future__ import annotations

import re

from genctl.errors import GenctlError, printable, without_secrets

LONGEST = 200  # characters of a server's own words in a message

# What taking a JSON value apart may raise, whatever it holds.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


class RowFailure(GenctlError):
    """A request that could not be done: the error of its row, while others go on."""

    code = "backend"


class Trouble(Exception):
    """A request that failed. Callers turn it into the error of a row, or into a BackendError.

    `again`: the same request may succeed later, after `wait_s` seconds if the server says so. `fatal`: no other request
    can succeed either. `status` is that of HTTP; None where there was no answer.
    """

    def __init__(
        self,
        message: str,
        *,
        again: bool = False,
        wait_s: float | None = None,
        fatal: bool = False,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.again = again
        self.wait_s = wait_s
        self.fatal = fatal
        self.status = status


class Late(Exception):
    """The time that a row may take is over."""


class Gone(Exception):
    """Nobody waits for the answer any more."""


def one_line(text: str, most: int = LONGEST) -> str:
    """The first line of a text from a server, harmless for a terminal and free of keys."""
    line = re.split(r"[\r\n]", text.strip()[: 4 * most], maxsplit=1)[0]
    line = printable(without_secrets(line))
    return line if len(line) <= most else line[: most - 1] + "…"

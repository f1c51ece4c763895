"""What can go wrong with a server, and requests that are sent again: how often, after which pauses, until when."""

from __future__ import annotations

import email.utils
import itertools
import random
import re
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, TypeVar

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


T = TypeVar("T")

ATTEMPTS = 6
FIRST_S = 0.5  # before the second attempt
LONGEST_S = 30.0
ASKED_S = 300.0  # the most that a request waits between its attempts, all pauses together
SAID_S = 1.0  # longer pauses are reported


async def patiently(
    ask: Callable[[], Awaitable[T]],
    *,
    seed: int,
    deadline: float | None = None,
    say: Callable[[str, float], object] = lambda message, pause: None,
    hopeless: Callable[[Trouble], bool] = lambda trouble: False,
    attempts: int = ATTEMPTS,
    counts: bool = True,
) -> T:
    """The result of `ask`, called again while it raises a Trouble that may pass.

    No pause goes beyond `deadline` (on the monotonic clock). `say` gets the reason and the seconds of a pause longer
    than a second. Raises the last Trouble, with the number of attempts if it `counts`.
    """
    sleep: Any = import_module("anyio").sleep
    waited = 0.0
    for attempt in itertools.count(1):
        try:
            return await ask()
        except Trouble as trouble:
            if not trouble.again or hopeless(trouble):
                raise
            pause = pause_s(attempt, seed, trouble.wait_s)
            late = deadline is not None and time.monotonic() + pause >= deadline
            too_long = waited + max(pause, trouble.wait_s or 0.0) > ASKED_S
            if attempt == attempts or too_long or late:
                raise _last(trouble, attempt if counts else 1, could_wait=attempt == attempts) from None
            if pause > SAID_S:
                say(trouble.message, pause)
            waited += pause
            await sleep(pause)
    raise AssertionError  # never reached: the loop has no end


def _last(trouble: Trouble, attempt: int, *, could_wait: bool) -> Trouble:
    """The trouble of the last attempt, with their number, and with the pause that would have been too long."""
    more = [f"{attempt} attempts"] if attempt > 1 else []
    if not could_wait and trouble.wait_s is not None:
        more.append(f"it asks to wait {trouble.wait_s:,.0f} s" if trouble.wait_s < 1e9 else "it asks to wait for years")
    elif not could_wait:
        more.append("no time is left for another attempt")
    message = f"{trouble.message} ({'; '.join(more)})" if more else trouble.message
    return Trouble(message, fatal=trouble.fatal, status=trouble.status)


def pause_s(attempt: int, seed: int, wait_s: float | None = None) -> float:
    """Seconds to wait after attempt number `attempt`, from 1.

    The wait doubles with each attempt, and jitter takes up to half of it away, so that requests which failed together
    do not come back together. `seed` decides the jitter. `wait_s`, what the server asks for, is the least.
    """
    jitter = random.Random(f"{seed}/{attempt}").uniform(0.5, 1.0)
    own: float = min(FIRST_S * 2 ** (attempt - 1), LONGEST_S) * jitter
    return own if wait_s is None else max(own, min(wait_s, ASKED_S))


def asked_s(header: str | None) -> float | None:
    """The seconds of a Retry-After header, which holds a number or a date; None if it holds neither."""
    if header is None:
        return None
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", header.strip()):
        return float(header)  # infinity where it has hundreds of digits
    try:
        return max(email.utils.parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError, ArithmeticError, IndexError, OSError):
        return None

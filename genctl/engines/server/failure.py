"""What can go wrong with a server, and requests that are sent again: how often, after which pauses, until when."""

from __future__ import annotations

import email.utils
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from genctl.errors import GenctlError, printable, without_secrets

LONGEST = 200  # characters of a server's own words in a message


class RowFailure(GenctlError):
    """A request that failed for good: the error of its row. Other rows continue."""

    code = "backend"


@dataclass(eq=False)
class ServerError(Exception):
    """A request that failed. Callers turn it into the error of a row, or into a BackendError."""

    message: str
    again: bool = False  # the same request may succeed later
    wait_s: float | None = None  # seconds until then, if the server names them
    fatal: bool = False  # no other request can succeed either
    status: int | None = None  # of HTTP; None where there was no answer
    hint: str = ""

    def __str__(self) -> str:
        return self.message


class TimedOut(Exception):
    """The time that a row may take is over."""


class Disconnected(Exception):
    """Nobody waits for the answer any more."""


# -- retries -----------------------------------------------------------------------------------------------------------

T = TypeVar("T")
ATTEMPTS = 6
FIRST_S = 0.5  # before the second attempt
LONGEST_S = 30.0
WAITS_S = 300.0  # the most that a request waits between its attempts, all pauses together


def retry(
    send: Callable[[], T],
    pause: Callable[[str, float], object],
    *,
    seed: int,
    deadline: float | None = None,
    final: Sequence[int | None] = (),
    attempts: int = 0,
    counts: bool = True,
) -> T:
    """The result of `send`, called again while it raises a ServerError that may pass.

    `pause` gets the reason and the seconds, and waits. No pause goes beyond `deadline`, on the monotonic clock. An
    error with a status in `final` is final. Raises the last error, with the number of attempts if it `counts`.
    """
    waited, attempts = 0.0, attempts or ATTEMPTS
    for attempt in itertools.count(1):
        try:
            return send()
        except ServerError as error:
            if not error.again or error.status in final:
                raise
            seconds, more = (
                pause_s(attempt, seed, error.wait_s),
                [f"{attempt} attempts"] if counts * attempt > 1 else [],
            )
            late = deadline is not None and time.monotonic() + seconds >= deadline
            too_long = late or waited + max(seconds, error.wait_s or 0.0) > WAITS_S
            if attempt == attempts or too_long:
                if attempt < attempts and error.wait_s is not None:
                    pause_words = f"{error.wait_s:,.0f} s" if error.wait_s < 1e9 else "for years"
                    more.append(f"it asks to wait {pause_words}")
                elif attempt < attempts:
                    more.append("no time is left for another attempt")
                message = f"{error.message} ({'; '.join(more)})" if more else error.message
                raise replace(error, message=message, again=False) from None
            waited += seconds
            pause(error.message, seconds)
    raise AssertionError  # never reached: the loop has no end


def pause_s(attempt: int, seed: int, wait_s: float | None = None) -> float:
    """Seconds to wait after attempt number `attempt`, from 1.

    The wait doubles with each attempt, and jitter takes up to half of it away, so that requests which failed together
    do not come back together. `seed` decides the jitter. `wait_s`, what the server asks for, is the least.
    """
    jitter = random.Random(f"{seed}/{attempt}").uniform(0.5, 1.0)
    own: float = min(FIRST_S * 2 ** (attempt - 1), LONGEST_S) * jitter
    return own if wait_s is None else max(own, min(wait_s, WAITS_S))


def retry_after(header: str | None) -> float | None:
    """The seconds of a Retry-After header, which holds a number or a date; None if it holds neither."""
    if header is None:
        return None
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", header.strip()):
        return float(header)  # infinity where it has hundreds of digits
    try:
        return max(email.utils.parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError, ArithmeticError, IndexError, OSError):
        return None


# -- a server's own words ----------------------------------------------------------------------------------------------


def one_line(text: str, most: int = LONGEST) -> str:
    """The first line of a text from a server, harmless for a terminal and free of keys."""
    line = re.split(r"[\r\n]", text.strip()[: 4 * most], maxsplit=1)[0]
    line = printable(without_secrets(line))
    return line if len(line) <= most else line[: most - 1] + "…"


def message_of(content: bytes, kind: str) -> str:
    """The message of a failed request, on one short line. `kind` is the type of the content."""
    try:
        return error_in(json.loads(content))
    except (ValueError, RecursionError):
        return "" if "html" in kind else one_line(content[:4096].decode("utf-8", "replace"))


def error_in(data: Any) -> str:
    """The message of a JSON error, in any of the usual forms; "" where there is none."""
    if not isinstance(data, Mapping):
        return ""
    error = next((data[name] for name in ("error", "detail", "message", "msg") if data.get(name)), None)
    if isinstance(error, list) and error:  # of FastAPI's checks: [{"loc": ["body", "n"], "msg": "…"}]
        error = error[0]
        if isinstance(error, Mapping):
            place, words = error.get("loc"), str(error.get("msg", ""))
            parts = place if isinstance(place, list) else [place]
            path = ".".join(str(part)[:40] for part in parts[:8])
            return one_line(words if place is None else f"{path}: {words}")
    if isinstance(error, Mapping):
        error = error.get("message", "")
    return one_line(error) if isinstance(error, str) else ""

"""What can go wrong with a server: its errors, the pauses before another attempt, and its own words in messages."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

from genctl.errors import BackendError, GenctlError, printable, without_secrets

LONGEST = 200  # characters of a server's own words in a message
ATTEMPTS = 6
FIRST_S = 0.5  # before the second attempt
LONGEST_S = 30.0
WAITS_S = 300.0  # the most that a request waits between its attempts, all pauses together


class ServerError(BackendError):
    """A request that failed: the error of its row, or of the run if it is `fatal`: no other request can succeed."""

    def __init__(
        self,
        message: str,
        *,
        again: bool = False,  # the same request may succeed later
        wait_s: float | None = None,  # seconds until then, if the server names them
        fatal: bool = False,
        status: int | None = None,  # of HTTP; None where there was no answer
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.again, self.wait_s, self.fatal, self.status = again, wait_s, fatal, status


class TimedOut(Exception):
    """The time that a row may take is over."""


class Disconnected(Exception):
    """Nobody waits for the answer any more."""


def pause_s(attempt: int, wait_s: float | None = None) -> float:
    """Seconds to wait after attempt number `attempt`, from 1; at least `wait_s`, which the server requests.

    The wait doubles with each attempt, and jitter takes up to half of it away, so that requests which failed together
    do not come back together.
    """
    own: float = min(FIRST_S * 2 ** (attempt - 1), LONGEST_S) * random.uniform(0.5, 1.0)
    return own if wait_s is None else max(own, min(wait_s, WAITS_S))


def retry_after(header: str | None) -> float | None:
    """The seconds of a Retry-After header; None if it holds no number. Hundreds of digits are infinity."""
    return float(header) if header and re.fullmatch(r"[0-9]+(\.[0-9]*)?", header.strip()) else None


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
    if isinstance(error, list) and error and isinstance(error[0], Mapping):  # of FastAPI: [{"loc": […], "msg": "…"}]
        place = error[0].get("loc")
        path = ".".join(str(part)[:40] for part in place[:8]) + ": " if isinstance(place, list) else ""
        return one_line(f"{path}{error[0].get('msg', '')}")
    if isinstance(error, Mapping):
        error = error.get("message", "")
    return one_line(error) if isinstance(error, str) else ""


def row_error(server: str, error: Exception) -> GenctlError:
    """The error of a row: one that is expected, else one that says what was raised."""
    if isinstance(error, GenctlError):
        return error
    return ServerError(f"{server}: unexpected {type(error).__name__}: {one_line(str(error))}")


def ends_run(error: GenctlError) -> bool:
    """Whether no other request can succeed."""
    return isinstance(error, BackendError) and (not isinstance(error, ServerError) or error.fatal)

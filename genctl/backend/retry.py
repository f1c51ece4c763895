"""How long to wait before a request is sent again."""

from __future__ import annotations

import email.utils
import random
import time

ATTEMPTS = 6
FIRST_S = 0.5  # before the second attempt
LONGEST_S = 30.0
ASKED_S = 300.0  # the longest wait that a server may ask for


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
    try:
        return max(float(header), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return None

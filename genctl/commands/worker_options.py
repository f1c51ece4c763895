"""`--workers` and `--address`: the options, and what they cannot be combined with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from genctl.cli.table import Conflict, OptionGroup, flag_of
from genctl.config.layers import Resolved
from genctl.errors import UsageError
from genctl.terminal.standard_streams import is_terminal

GROUP = OptionGroup("Workers (needs Ray)")
WORKERS: Any = GROUP.option("compute in N processes; auto: one for each GPU, else for each machine", "N|auto")
ADDRESS: Any = GROUP.option(
    "join a Ray cluster: auto (one that runs here), HOST:PORT or ray://HOST:PORT; else Ray starts here", "ADDRESS"
)
MOST_DIGITS = 5
FLAGS = ("workers", "address")


def wanted(options: Any) -> str:
    """The flag that asks for workers, or an empty string."""
    return next((flag_of(name) for name in FLAGS if getattr(options, name) is not None), "")


def _wrong_number(options: Any) -> bool:
    number = options.workers
    if number in (None, "auto"):
        return False
    return not (number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS and int(number) > 0)


def number_of(options: Any) -> int | None:
    """The number of workers; None: as many as there are GPUs or machines."""
    return None if options.workers in (None, "auto") else int(options.workers)


def refused(*rows: Conflict) -> tuple[Conflict, ...]:
    """Conflicts with workers. Sentences follow the flag that asks for them."""

    def asked(name: str, when: Callable[[Any], object]) -> Callable[[Any], object]:
        return lambda options: wanted(options) == flag_of(name) and when(options)

    number: Conflict = (
        _wrong_number,
        "--workers {workers}: must be a whole number from 1, or auto",
    )
    return (
        number,
        *((asked(name, when), f"{flag_of(name)} {sentence}") for when, sentence in rows for name in FLAGS),
    )


def check_workers(options: Any, early: Resolved) -> None:
    """What cannot work with workers, and is known once there are settings. Raises UsageError."""
    from genctl.engines.pool.cluster import check_cores, require_ray

    flag, runtime = wanted(options), early.runtime
    if options.input == "-" and is_terminal(sys.stdin):
        raise UsageError(f"{flag} gives whole groups of rows to workers, but --input - reads them from a keyboard")
    if runtime.device_map is not None:
        origin = early.origins["device_map"]
        raise UsageError(f"{flag} gives each worker a device, but device_map = {runtime.device_map} ({origin}) is one")
    if ":" in runtime.device:
        origin = early.origins["device"]
        raise UsageError(
            f"{flag} gives each worker a GPU of its own, but device = {runtime.device} ({origin}) names one for all",
            hint="say --device cuda",
        )
    require_ray(flag)
    check_cores(number_of(options), options.address)

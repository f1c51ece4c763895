"""Engines before they are loaded, and what a job needs to know about them by then.

`--workers` and `--address` with their conflicts are here too, and the ranks of a launcher.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from genctl.commands.table import Conflict, OptionGroup, because, flag_of
from genctl.config.layers import Resolved
from genctl.engines.protocol import Engine, EngineSetup
from genctl.errors import UsageError
from genctl.params import Runtime
from genctl.terminal.standard_streams import is_terminal

GROUP = OptionGroup("Workers (needs Ray)")
WORKERS: Any = GROUP.option("decode in N processes; auto: one per GPU, else one per machine", "N|auto")
ADDRESS: Any = GROUP.option(
    "join a Ray cluster: auto (one that runs here), HOST:PORT or ray://HOST:PORT; else Ray starts here", "ADDRESS"
)
NUMBER = re.compile(r"auto|(?=0*[1-9])[0-9]{1,5}")


def _local(setup: EngineSetup) -> Engine:
    from genctl.engines.session import Session

    return Session.opened(setup)


def _servers(setup: EngineSetup) -> Engine:
    from genctl.engines.server.session import RemoteSession

    return RemoteSession(setup)


def _pool(options: Any, setup: EngineSetup) -> Engine:
    from genctl.engines.pool.engine import load_pool

    return load_pool(setup, address=options.address, workers=number_of(options))


def shared(setup: EngineSetup) -> Engine:
    """Load the engine of ranks that compute the same rows together."""
    from genctl.engines.shared import SharedSession

    return SharedSession.opened(setup)


@dataclass(frozen=True)
class EngineChoice:
    """An engine that is not loaded yet, and what a job needs to know about it by then."""

    load: Callable[[EngineSetup], Engine] = _local
    check: Callable[[Any, Resolved], None] = lambda options, early: None  # raises UsageError for unsupported options
    live: bool = True  # events arrive during decoding, so that a view can follow them
    batches: bool = True  # rows are computed together, so the last digits of a row's numbers depend on its batch
    ranks: bool = False  # processes that were started together share the work

    @property
    def follows(self) -> bool:
        """Whether another process does the input and output, and this one only computes."""
        return self.ranks and os.environ.get("RANK") != "0"

    def meet(self, stack: ExitStack) -> None:
        """Join the other ranks, if there are any. Ranks that follow write nothing from now on."""
        if self.ranks:
            from genctl.engines import shared as group

            end_with_launcher()
            group.start()
            stack.callback(group.stop)
            if self.follows:
                group.silence(stack)

    def agree(self, value: Any) -> Any:
        """The value of rank 0; without ranks, `value` itself."""
        if not self.ranks:
            return value
        from genctl.engines import shared as group

        return group.broadcast(value, wait=True)


LOCAL = EngineChoice()
SERVERS = EngineChoice(_servers, batches=False)


def wanted(options: Any) -> str:
    """The flag that requests workers, or an empty string."""
    return next((flag_of(name) for name in ("workers", "address") if getattr(options, name) is not None), "")


def number_of(options: Any) -> int | None:
    """The number of workers; None: as many as there are GPUs or machines."""
    return None if options.workers in (None, "auto") else int(options.workers)


def refused(*rows: Conflict) -> tuple[Conflict, ...]:
    """Conflicts with workers. Each sentence follows the flag that requests them."""
    return (
        (
            lambda options: options.workers is not None and not NUMBER.fullmatch(options.workers),
            "--workers {workers}: must be a whole number from 1, or auto",
        ),
        *because(lambda options: wanted(options) == "--workers", "--workers ", *rows),
        *because(lambda options: wanted(options) == "--address", "--address ", *rows),
    )


def on_servers(options: Any) -> bool:
    """Whether any layer of settings names a server. Raises UsageError with --workers or --address."""
    layer = next((layer for layer in options.layers() if layer.values.get("backend") is not None), None)
    if layer is not None and (flag := wanted(options)):
        place = layer.place("backend")
        raise UsageError(f"{flag} computes in processes of this program, but {place} leaves that to a server")
    return layer is not None


def _check_workers(options: Any, early: Resolved) -> None:
    """Raises UsageError for options and settings that cannot be combined with workers."""
    if getattr(options, "dry", False):
        return
    from genctl.engines.pool.engine import require_ray

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


def engine_of(options: Any) -> EngineChoice:
    """The engine of a command that decodes or scores: in this process, in workers or on servers."""
    if on_servers(options):
        return SERVERS
    if wanted(options):
        return EngineChoice(partial(_pool, options), _check_workers, live=False)
    return LOCAL


# -- ranks: processes of `torchrun` or `accelerate launch`, which end with it ------------------------------------------


def end_with_launcher() -> None:
    """Have this process receive SIGTERM when its launcher is killed and cannot send it (on Linux)."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Launch(NamedTuple):
    """One of several processes that were started together."""

    rank: int  # 0 … size - 1
    size: int


def launch_of(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The place of this process among those started with it; None if it was started alone. Raises UsageError."""
    size, rank = environment.get("WORLD_SIZE"), environment.get("RANK")
    if size is None or rank is None or size == "1":
        return None
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise UsageError(f"RANK={rank:.40} and WORLD_SIZE={size:.40} in the environment are no place among processes")
    return Launch(int(rank), int(size))


def check_launch(runtime: Runtime, *, shares: bool) -> None:
    """Raises UsageError for several processes without --tensor-parallel, and for that option with a single process.

    `shares`: whether the command can share its work; if not, the option is refused too.
    """
    launch = launch_of()
    if launch is not None and not runtime.tensor_parallel:
        raise UsageError(
            f"{launch.size} processes were started together (WORLD_SIZE), and each would decode every prompt and write "
            "the same outputs",
            hint="add --tensor-parallel to share out one model, or start one process (and see --workers)",
        )
    if runtime.tensor_parallel and launch is None:
        raise UsageError(
            "--tensor-parallel shares out a model over several processes, but this one was started alone",
            hint="torchrun --nproc-per-node 2 --no-python genctl run … --tensor-parallel",
        )
    if runtime.tensor_parallel and not shares:
        raise UsageError("--tensor-parallel is for genctl run and genctl beam")

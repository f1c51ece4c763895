"""The processes of `torchrun` and `accelerate launch`, read from the environment, without torch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from genctl.errors import UsageError
from genctl.params import Runtime

# -- end a rank with the `torchrun` (or `accelerate launch`) that started it -------------------------------------------
# A launcher that receives a signal to end sends it to its ranks. A killed launcher cannot, and its ranks would continue
# unnoticed. So each rank watches its parent process.


LOOK_S = 1.0  # seconds between two checks
GRACE_S = 5.0  # seconds for rank 0 to write its results, and for the others to be notified


def watch(rank: int) -> None:
    """End this process as SIGTERM does once its parent has ended, if that is a launcher."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch, args=(rank, os.getppid()), name="launcher", daemon=True).start()


def _watch(rank: int, parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    if rank == 0:
        with contextlib.suppress(OSError):
            os.write(2, b"note: the launcher of the ranks (torchrun) has ended, so the ranks end, too\n")
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGTERM)


@dataclass(frozen=True)
class Launch:
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


def check(runtime: Runtime, *, shares: bool) -> None:
    """Raises UsageError for several processes without an option that shares the work, and for such an option alone.

    `shares`: the command can share its work.
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

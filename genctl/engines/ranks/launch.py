"""The processes of `torchrun` and `accelerate launch`, read from the environment, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from genctl.errors import UsageError
from genctl.params import Runtime


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
    flags = [
        flag for flag, is_set in (("--tensor-parallel", runtime.tensor_parallel), ("--fsdp", runtime.fsdp)) if is_set
    ]
    if len(flags) > 1:
        raise UsageError("--tensor-parallel and --fsdp are two ways to share out a model; leave out one of them")
    if launch is not None and not flags:
        raise UsageError(
            f"{launch.size} processes were started together (WORLD_SIZE), and each would decode every prompt and write "
            "the same outputs",
            hint="add --tensor-parallel or --fsdp to share out one model, or start one process (and see --workers)",
        )
    if flags and launch is None:
        raise UsageError(
            f"{flags[0]} shares out a model over several processes, but this one was started alone",
            hint=f"torchrun --nproc-per-node 2 --no-python genctl run … {flags[0]}",
        )
    if flags and not shares:
        raise UsageError(f"{flags[0]} is for genctl run and genctl beam")

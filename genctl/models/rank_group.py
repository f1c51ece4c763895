"""The processes of a run in torch.distributed: they start together and receive values from rank 0."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from genctl.errors import ModelError

# How long a rank waits for another one inside a step. Ranks load and decode in step, so they are seconds apart at most;
# a rank that is killed closes its connections, which ends the others at once.
TIMEOUT_S = 120
# How often rank 0 sends a heartbeat while it waits for a row, which may come from a pipe or a person.
BEAT_S = 10.0
# How long ranks wait for rank 0 to open its input.
PATIENCE = datetime.timedelta(days=7)


def start() -> None:
    """Join the other processes, once. Raises ModelError if they do not join."""
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"the processes that were started together do not find each other: {_line(error)}") from error


def stop() -> None:
    """Leave the group."""
    if dist.is_initialized():
        patient.cache_clear()
        dist.destroy_process_group()


def silence(stack: ExitStack) -> None:
    """For ranks other than 0: discard output, and leave signals to rank 0."""
    nowhere: Any = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 — the stack closes it
    stack.enter_context(nowhere)
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = nowhere

    def again() -> None:
        sys.stdout, sys.stderr = before

    stack.callback(again)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


@cache
def patient() -> Any:
    """A group of the same processes with a long timeout, for values that rank 0 reads."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def broadcast(value: Any, *, wait: bool = False) -> Any:
    """Rank 0's value, on every rank. All ranks call this together.

    `wait`: rank 0 may take long. Raises ModelError if a rank has ended or does not answer.
    """
    box = [value]
    try:
        dist.broadcast_object_list(box, src=0, group=patient() if wait else None)
    except RuntimeError as error:
        raise lost(error) from error
    return box[0]


def awaited(make: Callable[[], Any]) -> Any:
    """What `make` returns on rank 0, by `broadcast`. It may take long; a rank that does not answer is still noticed."""
    if dist.get_rank():
        while not (answer := broadcast(None))[0]:
            continue
        return answer[1]
    outcome: list[tuple[Any, BaseException | None]] = []
    done = threading.Event()

    def perform() -> None:
        try:
            outcome.append((make(), None))
        except BaseException as error:  # whatever it is, it is raised below
            outcome.append((None, error))
        done.set()

    threading.Thread(target=perform, name="rows", daemon=True).start()
    while not done.wait(min(BEAT_S, TIMEOUT_S / 4)):
        broadcast((False, None))
    value, error = outcome[0]
    if error is not None:
        raise error
    return broadcast((True, value))[1]


def from_rank_0(make: Callable[[], Any], *, waits: bool) -> Any:
    """What `make` returns on rank 0, on every rank. It is not called on the others. `waits`: it may take long."""
    if waits:
        return awaited(make)
    return broadcast(None if dist.get_rank() else make())


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's numbers for a tensor that every rank has in the same shape. Raises ModelError as `broadcast` does."""
    same = tensor.contiguous()
    try:
        dist.broadcast(same, src=0)
    except RuntimeError as error:
        raise lost(error) from error
    return same


def lost(error: BaseException) -> ModelError:
    """The error if another rank has ended."""
    return ModelError(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: another rank has ended or does not answer within "
        f"{TIMEOUT_S} s: {_line(error)}"
    )


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]

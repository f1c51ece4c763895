"""The engine of `--tensor-parallel`: processes that share a model, each of which runs the whole loop on all requests.

Tensor parallelism by transformers' plans: each rank holds a part of every large matrix, and all compute each pass
(Shoeybi et al., Megatron-LM, 2019). Sums over ranks are equal on all of them. Whatever could differ comes from rank 0
(requests, settings, the clock, whether to stop, and the logits of each pass), so equal seeds give equal choices.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from genctl import events
from genctl.config.layers import Resolved
from genctl.engines.protocol import ALONE, Flow, JobPlan, Report, Request, Rows, Skipped
from genctl.engines.session import Session
from genctl.errors import Exit, ModelError, UsageError
from genctl.params import Runtime

if TYPE_CHECKING:
    from genctl.models.hub import LoadedModel

# How long a rank waits for another one inside a step. Ranks load and decode in lockstep, at most seconds apart; a rank
# that is killed closes its connections, which ends the others at once.
TIMEOUT_S = 120
# How long ranks wait for rank 0 to read its input, which may come from a pipe or a person.
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
        _patient_group.cache_clear()
        dist.destroy_process_group()


def silence(stack: ExitStack) -> None:
    """For ranks other than 0: discard all output, and leave signals to rank 0."""
    nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (the stack closes it)
    stack.enter_context(redirect_stdout(nowhere))
    stack.enter_context(redirect_stderr(nowhere))
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


@cache
def _patient_group() -> Any:
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def broadcast(value: Any, *, wait: bool = False) -> Any:
    """Send rank 0's value to every rank. All ranks must call this.

    `wait`: rank 0 may take days. Raises ModelError if a rank has ended or does not answer.
    """
    box = [value]
    _together(dist.broadcast_object_list, box, group=_patient_group() if wait else None)
    return box[0]


def share(tensor: Tensor) -> Tensor:
    """Send rank 0's tensor to every rank; all pass one of the same shape. Raises ModelError as `broadcast` does."""
    same = tensor.contiguous()
    _together(dist.broadcast, same)
    return same


def _together(send: Callable[..., object], content: Any, **how: Any) -> None:
    try:
        send(content, src=0, **how)
    except RuntimeError as error:
        problem = f"another rank has ended or does not answer within {TIMEOUT_S} s: {_line(error)}"
        raise ModelError(f"rank {dist.get_rank()} of {dist.get_world_size()}: {problem}") from error


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _share_outputs(model: Any) -> None:
    """Make every pass return rank 0's logits f32 [N, T, V] on every rank, and its hidden states if there are any."""

    def same(module: Any, inputs: Any, output: Any) -> Any:
        output.logits = share(output.logits)
        for name in ("hidden_states", "decoder_hidden_states"):
            states = getattr(output, name, None)
            if states is not None:
                setattr(output, name, tuple(share(state) for state in states))
        return output

    model.register_forward_hook(same)


class SharedSession(Session):
    """A rank's part of a checkpoint. Ranks other than 0 `follow`."""

    ended = ""  # why rank 0 ended the stream, if not at its end

    def __init__(self, loaded: LoadedModel, runtime: Runtime, **how: Any) -> None:
        _share_outputs(loaded.model)
        super().__init__(loaded, runtime, **how)

    def plan(self, resolved: Resolved) -> JobPlan:
        """Check once whether the ranks can run a job. Raises UsageError for caches other than "dynamic" and "off"."""
        plan = super().plan(resolved)
        if (form := resolved.generation.cache_implementation) not in ("dynamic", "off"):
            raise UsageError(f"--tensor-parallel and --cache {form}: the cache is shared out as well, and grows")
        return plan

    def stream(
        self, requests: Rows, report: Report | None = None, flow: Flow = ALONE
    ) -> Generator[events.Event, None, None]:
        """Decode rank 0's requests on every rank (`Engine.stream`)."""
        self.clock = lambda: float(broadcast(time.perf_counter()))
        report, width, span, ahead = broadcast((report, flow.width, flow.span, flow.ahead))
        same = replace(
            flow, width=width, span=span, ahead=ahead, interrupted=lambda: str(broadcast(flow.interrupted()))
        )
        yield from super().stream(self._shared(requests), report, same)
        self.ended = str(broadcast(flow.interrupted()))

    def _shared(self, requests: Rows) -> Iterator[Request | Skipped]:
        """Rank 0's requests, on every rank."""
        rows = iter(requests)
        while (row := broadcast(next(rows, None), wait=self.waits)) is not None:
            yield row

    def follow(self) -> int:
        """Decode the requests of rank 0. Returns the exit status."""
        for _ in self.stream(()):
            pass
        return int(Exit.INTERRUPTED if self.ended else Exit.DONE)

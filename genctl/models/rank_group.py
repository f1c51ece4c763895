"""The processes of a run in torch.distributed: they start together, receive values from rank 0 and share a model.

Tensor parallelism by transformers' plans: each rank holds a part of every large matrix, and all compute each pass
(Shoeybi et al., Megatron-LM, 2019). Sums over ranks are equal on all of them; still, every rank receives rank 0's
logits after each pass, so that equal seeds give equal choices on any devices.
"""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from genctl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# How long a rank waits for another one inside a step. Ranks load and decode in step, so they are seconds apart at most;
# a rank that is killed closes its connections, which ends the others at once.
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
    """For ranks other than 0: discard output, and leave signals to rank 0."""
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
    """Rank 0's value, on every rank. All ranks call this together.

    `wait`: rank 0 may take days. Raises ModelError if a rank has ended or does not answer.
    """
    box = [value]
    try:
        dist.broadcast_object_list(box, src=0, group=_patient_group() if wait else None)
    except RuntimeError as error:
        raise _lost(error) from error
    return box[0]


def share(tensor: Tensor) -> Tensor:
    """Rank 0's numbers for a tensor that every rank has in the same shape. Raises ModelError as `broadcast` does."""
    same = tensor.contiguous()
    try:
        dist.broadcast(same, src=0)
    except RuntimeError as error:
        raise _lost(error) from error
    return same


def _lost(error: BaseException) -> ModelError:
    problem = f"another rank has ended or does not answer within {TIMEOUT_S} s: {_line(error)}"
    return ModelError(f"rank {dist.get_rank()} of {dist.get_world_size()}: {problem}")


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# -- a model whose parts lie on all ranks ------------------------------------------------------------------------------


def placement(config: PreTrainedConfig) -> dict[str, Any]:
    """The arguments of `from_pretrained` to distribute a model over all ranks. Raises ModelError if it cannot be."""
    start()
    size = dist.get_world_size()
    check_plan(config, size)
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}


def check_plan(config: Any, size: int) -> None:
    """Raises ModelError for an architecture without a plan, and for heads that cannot be shared out evenly."""
    text = config.get_text_config(decoder=True)
    if not (getattr(config, "base_model_tp_plan", None) or getattr(text, "base_model_tp_plan", None)):
        raise ModelError(f"--tensor-parallel: transformers has no plan for {config.model_type}")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % size:
            raise ModelError(f"--tensor-parallel: {name} = {heads} cannot be shared out evenly over {size} ranks")


def own_parts(model: Any) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of each parameter, by name."""
    for name, weight in model.named_parameters():
        yield name, weight.to_local() if hasattr(weight, "to_local") else weight


def share_outputs(model: Any) -> None:
    """After each pass every rank has rank 0's logits f32 [N, T, V], and its hidden states where they are returned."""

    def same(module: Any, inputs: Any, output: Any) -> Any:
        output.logits = share(output.logits)
        for name in ("hidden_states", "decoder_hidden_states"):
            states = getattr(output, name, None)
            if states is not None:
                setattr(output, name, tuple(share(state) for state in states))
        return output

    model.register_forward_hook(same)

"""Recognise out-of-memory errors, and free unused memory."""

from __future__ import annotations

import gc
from typing import Any

import torch

from genctl import events
from genctl.decode.types import Lane


class OutOfMemory(Exception):
    """A step or a prompt did not fit. `torn`: a search was interrupted in its choice and cannot be resumed."""

    def __init__(self, why: str, *, torn: bool = False) -> None:
        super().__init__(why)
        self.torn = torn

    def without_frames(self) -> OutOfMemory:
        """A copy without the traceback, whose frames hold tensors of what did not fit."""
        return OutOfMemory(str(self), torn=self.torn)


def is_shortage(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the CPU or on an accelerator."""
    if isinstance(error, (OutOfMemory, MemoryError, torch.OutOfMemoryError)):
        return True
    words = str(error)
    return "out of memory" in words or "can't allocate memory" in words or "not enough memory" in words


class shortages:
    """A context that turns any exception for a shortage of memory into OutOfMemory."""

    def __init__(self, *, torn: bool = False) -> None:
        self.torn = torn

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (MemoryError, RuntimeError)) and is_shortage(error):
            error.__traceback__ = error.__context__ = error.__cause__ = None  # their frames hold tensors of the pass
            raise OutOfMemory((str(error).splitlines() or [""])[0][:120], torn=self.torn) from None


def release() -> None:
    """Free unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def too_large(lane: Lane, rows: int, shortage: OutOfMemory) -> events.Failed:
    """The failure of a lane that does not fit alone."""
    tokens = len(lane.tokens) + len(lane.source or ())
    many = f"{rows} rows of it" if rows > 1 else "it alone"
    why = f" ({shortage})" if str(shortage) else ""
    return events.Failed(lane.name, "memory", f"not enough memory for a prompt of {tokens} tokens, {many}{why}")

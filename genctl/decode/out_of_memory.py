"""Recognise out-of-memory errors, and free unused memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OutOfMemory(Exception):
    """A step or a prompt did not fit. `torn`: a search was interrupted in its choice and cannot be resumed."""

    def __init__(self, why: str, *, torn: bool = False) -> None:
        super().__init__(why)
        self.torn = torn


def is_shortage(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the CPU or on an accelerator."""
    if isinstance(error, (OutOfMemory, MemoryError, torch.OutOfMemoryError)):
        return True
    words = str(error)
    return "out of memory" in words or "can't allocate memory" in words or "not enough memory" in words


@contextmanager
def shortages(*, torn: bool = False) -> Iterator[None]:
    """Within, any exception that means that memory ran out becomes OutOfMemory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        error.__traceback__ = None  # its frames hold the tensors of the pass
        raise OutOfMemory((str(error).splitlines() or [""])[0][:120], torn=torn) from None


def release() -> None:
    """Free unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

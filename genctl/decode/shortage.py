"""Where memory runs out: how an exception says so, and giving back what nobody holds."""

from __future__ import annotations

import gc

import torch


def is_shortage(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the CPU or on an accelerator."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = str(error)
    return "out of memory" in words or "can't allocate memory" in words or "not enough memory" in words


def release() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

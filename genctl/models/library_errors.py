"""Turn errors of the libraries that read a checkpoint into ModelErrors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from genctl.errors import GenctlError, ModelError
from genctl.models.resolve import brief

_T = TypeVar("_T")
_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def guarded(call: Callable[[], _T], what: str) -> _T:
    """Run a library's code; any exception becomes a ModelError of one line."""
    try:
        return call()
    except GenctlError:
        raise
    except BaseException as error:
        if not (
            isinstance(error, Exception) or type(error).__name__ == "PanicException"
        ):  # a Rust panic is not an Exception
            raise
        if is_shortage(error):
            raise ModelError(f"{what}: not enough memory", hint="--dtype bfloat16 needs half of float32") from error
        raise ModelError(f"{what}: {brief(error)}") from error


def is_shortage(error: BaseException) -> bool:
    """Whether memory ran out, in Python or in torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _MEMORY)

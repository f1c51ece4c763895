"""Calls into libraries that read a checkpoint: how often they are made, and what their errors become.

A checkpoint is read sparingly first (`lean`, `skeleton`), and once more without that if something in it does not bear
it. Only then: what is wrong with a file, or with the memory, is wrong the second time, too, and takes as long again.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from typing import TypeVar

from genctl.errors import GenctlError, ModelError
from genctl.models.resolve import brief

_T = TypeVar("_T")
_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
# What a module that was left out, or a tensor without numbers where one with numbers is expected, can lead to.
_OF_SPARING = (
    *(ImportError, AttributeError, NameError, TypeError, ValueError, LookupError),
    *(AssertionError, RuntimeError),  # NotImplementedError is one
)
_OF_FILES = (OSError, EOFError, UnicodeError, pickle.PickleError, zipfile.BadZipFile)


def twice(read: Callable[[bool], _T], *, sparing: bool, between: Callable[[], object] = lambda: None) -> _T:
    """`read(True)`, then `between()` and `read(False)` if the sparing may be why it failed. Once if not `sparing`."""
    if not sparing:
        return read(False)
    try:
        return read(True)
    except Exception as error:
        if is_final(error):
            raise
    between()  # outside of the handler: the model of the first attempt is gone
    return read(False)


def guarded(call: Callable[[], _T], what: str) -> _T:
    """Run a library's code; whatever it raises becomes a ModelError of one line."""
    try:
        return call()
    except GenctlError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):  # Rust's: no Exception
            raise
        if is_shortage(error):
            raise ModelError(f"{what}: not enough memory", hint="--dtype bfloat16 needs half of float32") from error
        raise ModelError(f"{what}: {brief(error)}") from error


def is_final(error: BaseException) -> bool:
    """Whether a second attempt would end alike: an error of ours, of memory or of a file."""
    if isinstance(error, GenctlError):
        return error.__cause__ is None or is_final(error.__cause__)
    if is_shortage(error) or isinstance(error, _OF_FILES):
        return True
    return not isinstance(error, _OF_SPARING)  # those of libraries in Rust are plain exceptions or their own


def is_shortage(error: BaseException) -> bool:
    """Whether memory ran out, in Python or in torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _MEMORY)

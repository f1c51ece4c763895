"""Errors of the libraries that read a checkpoint: each becomes a ModelError of one line.

A panic of a Rust library also writes a report (with a backtrace if RUST_BACKTRACE is set) to file descriptor 2 before
Python sees the exception. It is kept off the terminal; replacing `sys.stderr` would not help.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from genctl.errors import GenctlError, ModelError, is_shortage
from genctl.models.resolve import brief

_T = TypeVar("_T")
_REPORT = re.compile(rb"\n?thread '[^\n]* panicked at .*", re.DOTALL)
_LOCK = threading.RLock()
_buffer = -1  # an unnamed file that collects the output; created once
_depth = 0


def guarded(call: Callable[[], _T], what: str) -> _T:
    """Run a library's code; any exception becomes a ModelError of one line."""
    try:
        return call()
    except GenctlError:
        raise
    except BaseException as error:
        if not is_library_error(error):
            raise
        if isinstance(error, (MemoryError, RuntimeError)) and is_shortage(error):
            raise ModelError(f"{what}: not enough memory", hint="--dtype bfloat16 needs half of float32") from error
        raise ModelError(f"{what}: {brief(error)}") from error


def is_library_error(error: BaseException) -> bool:
    """Whether an error is a library's: an Exception, or a Rust panic, which is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def without_panic_reports() -> Iterator[None]:
    """Delay output to descriptor 2 until the end, and remove panic reports from it.

    One thread at a time; output of other threads is delayed too. Without a descriptor 2 this does nothing.
    """
    global _depth
    with _LOCK:
        saved = _begin() if _depth == 0 else -1
        _depth += 1
        failed = True
        try:
            yield
            failed = False
        finally:
            _depth -= 1
            if saved >= 0:
                _end(saved, failed=failed)


def _begin() -> int:
    global _buffer
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # descriptor 2 is closed
        return -1
    try:
        if _buffer < 0:
            _buffer = os.memfd_create("genctl") if hasattr(os, "memfd_create") else _unnamed()
        os.dup2(_buffer, 2)
    except OSError:
        os.close(saved)
        return -1
    return saved


def _unnamed() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _end(saved: int, *, failed: bool) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    os.dup2(saved, 2)
    os.close(saved)
    if not (size := os.lseek(_buffer, 0, os.SEEK_CUR)):
        return
    os.lseek(_buffer, 0, os.SEEK_SET)
    content = os.read(_buffer, size)
    os.lseek(_buffer, 0, os.SEEK_SET)
    os.ftruncate(_buffer, 0)
    left = _REPORT.sub(b"", content) if failed else content
    with contextlib.suppress(OSError):
        while left:
            left = left[os.write(2, left) :]

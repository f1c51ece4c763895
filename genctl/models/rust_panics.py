"""Keep panic reports of Rust libraries off the terminal: our error reports the failure in one line.

Rust writes its report (with a backtrace if RUST_BACKTRACE is set) to file descriptor 2 before Python sees the
exception, so replacing `sys.stderr` does not help.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_REPORT = re.compile(rb"\n?thread '[^\n]* panicked at .*", re.DOTALL)
_LOCK = threading.RLock()
_kept = -1  # a file without a name, for what is written meanwhile; made once
_depth = 0


@contextmanager
def without_panic_reports() -> Iterator[None]:
    """Delay what is written to descriptor 2 until the end, and remove panic reports from it.

    One thread at a time; output of other threads is delayed too. Without a descriptor 2 nothing happens.
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
    global _kept
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # it is closed
        return -1
    try:
        if _kept < 0:
            _kept = os.memfd_create("genctl") if hasattr(os, "memfd_create") else _unnamed()
        os.dup2(_kept, 2)
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
    if not (size := os.lseek(_kept, 0, os.SEEK_CUR)):
        return
    os.lseek(_kept, 0, os.SEEK_SET)
    content = os.read(_kept, size)
    os.lseek(_kept, 0, os.SEEK_SET)
    os.ftruncate(_kept, 0)
    left = _REPORT.sub(b"", content) if failed else content
    with contextlib.suppress(OSError):
        while left:
            left = left[os.write(2, left) :]

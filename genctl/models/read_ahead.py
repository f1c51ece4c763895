"""Let the system read weight files into memory while Python imports torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PIECE = 1 << 21  # bytes; Linux reads no more than a few MiB for one piece of advice


def read_ahead(files: Iterable[Path]) -> threading.Thread | None:
    """Start reading these files in the background, if the system can (Linux) and half of the memory holds them.

    A thread gives the advice piece by piece, because the call blocks on a slow disk. No result depends on it.
    """
    paths = list(files)
    with suppress(AttributeError, OSError, ValueError):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if not hasattr(os, "posix_fadvise") or sum(path.stat().st_size for path in paths) > memory // 2:
            return None
        thread = threading.Thread(target=_advise, args=(paths,), name="read-ahead", daemon=True)
        thread.start()
        return thread
    return None


def _advise(paths: list[Path]) -> None:
    with suppress(OSError):
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for start in range(0, os.fstat(descriptor).st_size, _PIECE):
                    os.posix_fadvise(descriptor, start, _PIECE, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

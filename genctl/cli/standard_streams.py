"""Standard streams that the caller closed or broke: results fail with a sentence, diagnostics with nothing at all.

A descriptor 0, 1 or 2 that is closed is what the next file that is opened becomes: an output file would then receive
what is printed. So each is given a stand-in before anything is opened. Reading from a stand-in for standard input, or
writing to one for standard output, fails with "Bad file descriptor", as it does in `cat <&-` and `cat >&-`.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO


def mend() -> None:
    """Fill closed standard descriptors, and let nothing that is printed on standard error fail."""
    # the wrong way round on purpose: reading 0 and writing 1 must fail, as they do on a closed descriptor
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        _fill(descriptor, mode)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (open to the end)
    sys.stderr = _diagnostics(sys.stderr)


def let_go() -> None:
    """Nobody takes what is printed any more: keep the interpreter from complaining about the rest at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, stream.fileno())
                os.close(devnull)


def _fill(descriptor: int, mode: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        stand_in = os.open(os.devnull, mode)  # the lowest number that is free
        if stand_in != descriptor:
            os.dup2(stand_in, descriptor)
            os.close(stand_in)
        os.set_inheritable(descriptor, True)


def _diagnostics(before: TextIO | None) -> TextIO:
    """Standard error on which a write never fails: who closed it, or has no room for it, wants results all the same."""
    encoding = "utf-8" if before is None else before.encoding
    raw = io.FileIO(2, "w", closefd=False)
    return _Diagnostics(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=True)


class _Diagnostics(io.TextIOWrapper):
    """Where one write fails, this one and those that follow go nowhere.

    Failures are caught up here and not in the raw stream: a signal that is answered between its write and its return
    would have the buffer write the same once more.
    """

    def write(self, text: str, /) -> int:
        """Write, or do not."""
        with _unheard():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or do not."""
        with _unheard():
            super().flush()


@contextmanager
def _unheard() -> Iterator[None]:
    try:
        yield
    except BlockingIOError:  # a full pipe that must not be waited for: what fits into the buffer is written later
        pass
    except OSError:
        with suppress(OSError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 2)
            os.close(devnull)

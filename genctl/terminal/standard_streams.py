"""Standard streams that are closed or broken: writing results fails with a message, diagnostics are dropped.

If descriptor 0, 1 or 2 is closed, the next file that is opened gets its number: an output file would then receive
printed messages. So each gets a stand-in before anything is opened. Reading from a stand-in for standard input, or
writing to one for standard output, fails with "Bad file descriptor", as it does in `cat <&-` and `cat >&-`.
`print_message` prints on standard error.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import contextmanager, suppress

from genctl.terminal import loading_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import IO


def repair_fds() -> None:
    """Fill closed standard descriptors, and make standard error a stream on which no write fails."""
    # modes are swapped on purpose: reading 0 and writing 1 must fail, as on a closed descriptor
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            _stand_in(descriptor, mode)
            os.set_inheritable(descriptor, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (open to the end)
    encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
    raw = io.FileIO(2, "w", closefd=False)
    sys.stderr = _Diagnostics(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=True)


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a stream is a terminal. A missing or closed one is not."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def print_interrupted() -> None:
    """Print on standard error that Ctrl-C ended the command; bypass the stream, which another thread may lock."""
    with suppress(OSError):
        os.write(2, b"\rinterrupted\n" if os.isatty(2) else b"interrupted\n")


def drop_stdout() -> None:
    """Drop what is still buffered for a broken stdout or stderr, so that the interpreter exits without complaint."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                _stand_in(stream.fileno(), os.O_WRONLY)


def _stand_in(descriptor: int, mode: int) -> None:
    """Redirect a descriptor to the null device."""
    devnull = os.open(os.devnull, mode)  # the lowest number that is free: perhaps the descriptor itself
    if devnull != descriptor:
        os.dup2(devnull, descriptor)
        os.close(devnull)


class _Diagnostics(io.TextIOWrapper):
    """Standard error. Results matter even if it is closed or full, so after a failed write all others are dropped.

    Failures are caught here and not in the raw stream: a signal handled between its write and its return would make
    the buffer write the same bytes again.
    """

    def write(self, text: str, /) -> int:
        """Write; ignore a failure."""
        loading_line.clear()
        with _ignore_failure():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Flush; ignore a failure."""
        with _ignore_failure():
            super().flush()


@contextmanager
def _ignore_failure() -> Iterator[None]:
    try:
        yield
    except BlockingIOError:  # a full pipe that does not block: what fits into the buffer is written later
        pass
    except OSError:
        with suppress(OSError):
            _stand_in(2, os.O_WRONLY)


def never_fail_to_encode(stream: IO[str]) -> None:
    """Make a stream escape the characters that its encoding lacks, instead of raising."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None and getattr(stream, "errors", None) == "strict":
        reconfigure(errors="backslashreplace")


# -- messages ----------------------------------------------------------------------------------------------------------


def print_message(line: str, *, color: str = "auto") -> None:
    """Print one line on standard error without secrets, control characters made visible; `error:` has its colour."""
    from genctl.errors import without_secrets
    from genctl.terminal.widgets import visible

    shown = visible(without_secrets(line))
    if shown.startswith("error:") and is_coloured(color, sys.stderr):
        shown = f"\x1b[1;31merror:\x1b[0m{shown[6:]}"
    print(shown, file=sys.stderr, flush=True)


def is_coloured(color: str, stream: IO[str] | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a stream gets colours.

    `color` overrides the environment. With "auto", NO_COLOR overrides FORCE_COLOR (which means "always"), and both
    override TERM=dumb and whether the stream is a terminal.
    """
    if color == "auto" and environ.get("NO_COLOR"):
        return False
    if color == "auto" and not environ.get("FORCE_COLOR"):
        return is_terminal(stream) and not is_dumb(environ)
    return color != "never"


def is_dumb(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the terminal supports no control sequences."""
    return environ.get("TERM", "").lower() in ("dumb", "unknown")

"""`python -m genctl` and the `genctl` command."""

from __future__ import annotations

import gc
import os
import signal
import sys

TYPE_CHECKING = False  # `typing` would be half of the time in which a signal finds nobody
if TYPE_CHECKING:
    from types import FrameType

ENDING = ("SIGINT", "SIGTERM", "SIGHUP")


def _end(number: int, frame: FrameType | None) -> None:
    """Nothing is written yet that could be lost; a command that writes listens for itself (see `cli.interrupt`)."""
    sign = sys.modules.get("genctl.cli.first_sign")
    if sign is not None:
        sign.clear()
    if number == signal.SIGINT:
        try:  # noqa: SIM105 (`contextlib` is not imported yet)
            os.write(2, b"\rinterrupted\n" if os.isatty(2) else b"interrupted\n")
        except OSError:  # closed
            pass
    os._exit(128 + number)


def _heed(handler: object) -> None:
    """Give the signals that end a process to `handler`, but not those that the caller wants ignored (`nohup`)."""
    for name in ENDING:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]


def main() -> None:
    """Run the command line and exit with its status."""
    _heed(_end)  # before anything else is imported
    from genctl import collection
    from genctl.cli import first_sign
    from genctl.cli.standard_streams import mend, say_interrupted

    collection.pause()  # until torch is imported (`models.hub`)
    mend()
    first_sign.show(sys.argv[1:])
    try:
        if sys.argv[1:] in (["--version"], ["-V"]):  # answered before anything is imported
            from genctl import __version__

            print(f"genctl {__version__}", flush=True)
            status = 0
        else:
            from genctl.cli.app import run

            status = run()
    except OSError as error:
        from genctl.cli.app import unwritten

        status = unwritten(error)
    except KeyboardInterrupt:
        status = 130
    except SystemExit as ending:
        if not isinstance(ending.code, int):
            raise
        status = ending.code
    first_sign.clear()
    _heed(signal.SIG_IGN)  # all is done: the status is what became of it
    if status > 128:  # everything is written; taking down torch would keep a person waiting for a second
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
        if status == 130:
            say_interrupted()
        os._exit(status)
    gc.freeze()  # memory goes back with the process: what is left need not be looked through for cycles
    sys.exit(status)


if __name__ == "__main__":
    main()

"""`python -m genctl` and the `genctl` command."""

from __future__ import annotations

import sys

from genctl import process

if __name__ == "__main__":
    process.forget_working_directory()  # before anything is imported that a file there could replace

import gc
import os
import signal

TYPE_CHECKING = False  # importing `typing` would double the time without a signal handler
if TYPE_CHECKING:
    from types import FrameType

ENDING = ("SIGINT", "SIGTERM", "SIGHUP")


def _end(number: int, frame: FrameType | None) -> None:
    """Exit at once: nothing is written yet. A command that writes has its own handler (see `terminal.interrupt`)."""
    try:  # noqa: SIM105 (`contextlib` is not imported yet)
        sys.modules["genctl.terminal.loading_line"].clear()
    except Exception:  # not imported, or only partly
        pass
    if number == signal.SIGINT:
        try:  # noqa: SIM105 (`contextlib` is not imported yet)
            os.write(2, b"\rinterrupted\n" if os.isatty(2) else b"interrupted\n")
        except OSError:  # stderr is closed
            pass
    os._exit(128 + number)


def _handle(handler: object) -> None:
    """Install `handler` for the signals that end a process, except those that stay ignored (`nohup`)."""
    for name in ENDING:
        number = getattr(signal, name, None)
        if number is not None and not process.stays_ignored(number):
            signal.signal(number, handler)  # type: ignore[arg-type]


def main() -> None:
    """Run the command line and exit with its status."""
    _handle(_end)  # before anything else is imported
    process.protect_children()
    from genctl.terminal import loading_line
    from genctl.terminal.standard_streams import print_interrupted, repair_fds

    process.pause_collector()  # until torch is imported (`models.hub`)
    repair_fds()
    loading_line.show(sys.argv[1:])
    try:
        if sys.argv[1:] in (["--version"], ["-V"]):  # answered before anything is imported
            from genctl.process import __version__

            print(f"genctl {__version__}", flush=True)
            status = 0
        else:
            from genctl.commands.app import run

            status = run()
    except OSError as error:
        from genctl.commands.app import unwritten

        status = unwritten(error)
    except KeyboardInterrupt:
        status = 130
    except SystemExit as ending:
        if not isinstance(ending.code, int):
            raise
        status = ending.code
    loading_line.clear()
    _handle(signal.SIG_IGN)  # everything is done; a signal must not change the exit status
    if status > 128:  # everything is written; unloading torch would take a second
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
        if status == 130:
            print_interrupted()
        os._exit(status)
    gc.freeze()  # the memory is freed with the process: do not search it for cycles
    sys.exit(status)


if __name__ == "__main__":
    main()

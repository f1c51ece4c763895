"""`python -m genctl` and the `genctl` command."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line and exit with its status."""
    if sys.argv[1:] in (["--version"], ["-V"]):  # answered before anything is imported
        from genctl import __version__

        print(f"genctl {__version__}")
        return
    signal.signal(signal.SIGTERM, _terminated)
    try:
        from genctl.cli.app import run

        status = run()
    except KeyboardInterrupt:
        status = 130
    except SystemExit as ending:
        if not isinstance(ending.code, int):
            raise
        status = ending.code
    if status in (130, 143):  # everything is written; taking down torch would keep a person waiting for a second
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()

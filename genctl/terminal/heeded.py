"""Which signals a program heeds that its caller has it ignore. This file imports as little as it can (`__main__`)."""

from __future__ import annotations

import os
import signal


def stays_ignored(number: int) -> bool:
    """Whether a signal is ignored and stays so: SIGHUP as `nohup` wants it, SIGINT as a shell does for what a script
    starts in the background.

    SIGINT is heeded nevertheless where standard input is a terminal: somebody presses Ctrl-C there. Such a background
    job reads no terminal, though it may write to one.
    """
    if signal.getsignal(number) is not signal.SIG_IGN:
        return False
    return number != signal.SIGINT or not os.isatty(0)

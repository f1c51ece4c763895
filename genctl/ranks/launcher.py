"""A rank ends with the `torchrun` (or `accelerate launch`) that started it.

A launcher that is asked to end asks its ranks to. One that is killed cannot: its ranks would go on by themselves, and
nobody would know. So each rank looks at who its parent is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

LOOK_S = 1.0  # between two looks
GRACE_S = 5.0  # for rank 0 to write what it has, and for the others to hear of it


def watch(rank: int) -> None:
    """End this process as SIGTERM does once its parent has ended, if that is a launcher."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch, args=(rank, os.getppid()), name="launcher", daemon=True).start()


def _watch(rank: int, parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    if rank == 0:
        with contextlib.suppress(OSError):
            os.write(2, b"note: the launcher of the ranks (torchrun) has ended, so the ranks end, too\n")
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGTERM)

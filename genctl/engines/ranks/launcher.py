"""End a rank with the `torchrun` (or `accelerate launch`) that started it.

A launcher that receives a signal to end sends it to its ranks. A killed launcher cannot, and its ranks would continue
unnoticed. So each rank watches its parent process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

LOOK_S = 1.0  # seconds between two checks
GRACE_S = 5.0  # seconds for rank 0 to write its results, and for the others to be notified


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

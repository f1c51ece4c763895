"""The processes of a Ray that was started here, and its folder of logs: none of them outlives the run.

Ray's daemons end with the process that started them (on Linux the kernel sees to it). What the daemons have started
(workers, and two agents) would notice that a minute later.
"""

from __future__ import annotations

import contextlib
import shutil
import sys

import psutil

DAEMONS = ("gcs_server", "raylet")


class RayProcesses:
    """Processes that are started below this one after this was made."""

    def __init__(self) -> None:
        self._before = psutil.Process().children(recursive=True)
        self._known: list[psutil.Process] = []
        self.logs = ""  # Ray's folder of this session, once it is known

    def note(self) -> None:
        """Remember those that are there: they cannot be found any more once the daemon that started them has ended."""
        here = psutil.Process().children(recursive=True)
        self._known += [process for process in here if process not in self._before and process not in self._known]

    def end(self, *, at_once: bool, keep_logs: bool) -> None:
        """Remove the logs, and end all that are left.

        `at_once`: this process still uses Ray, and ends next. Daemons that end with it are left alone.
        """
        if self.logs and not keep_logs:
            shutil.rmtree(self.logs, ignore_errors=True)
        for process in self._known:
            with contextlib.suppress(psutil.Error):
                if not (at_once and process.name() in DAEMONS and sys.platform == "linux"):
                    process.kill()

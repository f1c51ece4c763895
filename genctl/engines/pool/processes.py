"""The processes of a Ray that was started here, and its folder of logs: none of them outlives the run.

Ray's daemons end with the process that started them (on Linux the kernel sees to it). What the daemons have started
(workers, and two agents) would notice that a minute later.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess

import psutil

# $1: the process to wait for, 5 s at most (until its parent has asked for its status, it is there); $2: a folder
_AFTER = """
us=$1 logs=$2; shift 2
for turn in $(seq 100); do kill -0 "$us" || break; sleep 0.05; done
kill -9 "$@"
[ -z "$logs" ] || rm -rf -- "$logs"
"""


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

    def end(self, *, keep_logs: bool) -> None:
        """Remove the logs, and end all that are left."""
        for process in self._known:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.logs and not keep_logs:
            shutil.rmtree(self.logs, ignore_errors=True)

    def end_after_us(self, *, keep_logs: bool) -> None:
        """Let a shell do it once this process has ended, which still uses Ray: Ray ends a process that loses what it
        uses, with a status of its own.
        """
        numbers = [str(process.pid) for process in self._known if process.is_running()]
        logs = self.logs if not keep_logs else ""
        if numbers and os.name == "posix":
            subprocess.Popen(
                ["/bin/sh", "-c", _AFTER, "sh", str(os.getpid()), logs, *numbers],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

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

from genctl.engines.pool.worker_env import new_folder

# $1: a folder. Standard input ends with the process that has its other end, unless a word comes first.
_AFTER = """
logs=$1; shift
read -r word && exit
kill -9 "$@"
[ -z "$logs" ] || rm -rf -- "$logs"
"""


class RayProcesses:
    """Processes that are started below this one after this was made."""

    def __init__(self) -> None:
        self._before = psutil.Process().children(recursive=True)
        self._known: list[psutil.Process] = []
        self._after: subprocess.Popen[bytes] | None = None  # the shell that `end_after_us` has started
        self.logs = ""  # Ray's folder of this session, once it is made

    def own_folder(self) -> str:
        """A folder for Ray's sockets and logs, to be removed at the end."""
        self.logs = new_folder()
        return self.logs

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
        if self._after is not None:
            self._after.communicate(b"done\n")

    def end_after_us(self, *, keep_logs: bool) -> None:
        """Let a shell do it once this process has ended, unless `end` comes first.

        Ray ends a process that loses what it uses, with a status of its own; so nothing is ended while it is used.
        """
        numbers = [str(process.pid) for process in self._known if process.is_running()]
        if numbers and os.name == "posix" and self._after is None:
            self._after = subprocess.Popen(
                ["/bin/sh", "-c", _AFTER, "sh", "" if keep_logs else self.logs, *numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

"""The number of threads, from the work of a step and from the cores that other processes leave free.

A second thread helps only if both have enough to do. In a small model threads wait for each other longer than they
compute. If another process occupies a core, all threads wait for the one that does not run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from genctl.errors import count, size

TEXT = 32  # about as many tokens are computed at once when a whole text is read
SHARE = 20 << 20  # bytes of weights that a thread reads in about a millisecond, against a loss of some µs per product
LEAST = 5 * SHARE  # the least work for a second thread: two threads that wait for each other may cost much
_ROWS = 5  # as many rows take a second as long to multiply as the weights take to read
_BRIEF_S = 0.2  # the kernel counts in hundredths of a second: a shorter span is too inexact
_BUSY = (0, 1, 2, 5, 6, 7)  # columns of /proc/stat: user, nice, system, irq, softirq, steal
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # torch reads them in this order


def cores() -> int:
    """The cores that this process may use: its affinity, and its cgroup's quota of time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(allowed, int(quota() or allowed)), 1)


def from_environment() -> tuple[int, str] | None:
    """The number of threads that an environment variable sets, and the variable's name."""
    for name in _VARIABLES:
        value = os.environ.get(name, "").partition(",")[0].strip()
        if value.isdecimal() and int(value):
            return int(value), name
    return None


def for_step(weights: int, rows: int) -> int:
    """The number of threads that have enough work in a forward pass of `rows` rows through `weights` bytes."""
    work = int(weights * (1 + rows / _ROWS))
    return work // SHARE if work >= LEAST else 1


def set_threads(number: int) -> None:
    """Set torch's number of threads. Nothing else sets it."""
    import torch

    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


class Threads:
    """The number of threads of a job. Make it before torch is imported: the import is time to measure other processes.

    `given` is the knob `threads`. Without it an environment variable decides, and without both the work and the free
    cores. If `steady`, the load does not count: the last digits of a result depend on the number of threads, and equal
    jobs write equal bytes. A worker has a `share` of the cores, and the load does not count. Ranks keep what their
    launcher has set: all of them must compute alike.
    """

    def __init__(self, given: int | None = None, *, share: int | None = None, steady: bool = False) -> None:
        self.number: int | None = None  # None: torch's own
        self.reason = ""
        self.fixed = True
        self._load = OtherLoad()
        self._share, self._steady = share, steady
        variable = from_environment() if share is None else None
        if given is not None:
            self.number, self.reason = given, "as set" + _beyond(given)
        elif variable is not None:
            self.number, self.reason = variable[0], variable[1] + _beyond(variable[0])
        elif share is None and "WORLD_SIZE" in os.environ:
            self.reason = "one of several ranks"
        else:
            self.fixed = False

    def apply(self, weights: int, rows: int = 1, *, device: str = "cpu", recorded: int | None = None) -> None:
        """Set torch's threads for steps of this many rows. `recorded`: the number with which an output began.

        On another device than the CPU torch keeps its own number, unless one is given.
        """
        if not self.fixed:
            if recorded is not None:
                self.number, self.reason = recorded, "as the output was begun"
            elif device != "cpu":
                self.number, self.reason = None, f"torch's own beside {device}"
            else:
                self._choose(weights, rows)
        if self.number is not None:
            set_threads(self.number)

    def _choose(self, weights: int, rows: int) -> None:
        there, work = self._share or cores(), for_step(weights, rows)
        busy = 0.0 if self._share or self._steady else self._load.cores()
        free = max(there - round(busy), 1)
        self.number = min(work, free)
        others = f"; other processes keep {busy:.1f} busy" if free < min(work, there) else ""
        work_words = f"{size(weights)} of weights, {count(rows, 'row')}"
        self.reason = f"{count(there, 'core')}, {work_words} at a step{others}"

    @property
    def note(self) -> str:
        """What was chosen and why, for --verbose."""
        import torch

        return f"threads: {self.number or torch.get_num_threads()} ({self.reason})"


class OtherLoad:
    """How many of our cores other processes have kept busy since this was made."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy_s(), time.process_time()

    def cores(self) -> float:
        """The cores that they keep busy since the beginning, or in the last minute if that was only a moment ago."""
        now, busy = time.monotonic(), _busy_s()
        span = now - self._began
        if span < _BRIEF_S or self._busy is None or busy is None:
            return max(os.getloadavg()[0] - 1, 0.0) if hasattr(os, "getloadavg") else 0.0
        return max(busy - self._busy - (time.process_time() - self._own), 0.0) / span


def _busy_s() -> float | None:
    """Seconds that the cores of this process have worked for any process; None if the system does not say."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in lines]
        ticks = sum(int(row[1 + column]) for row in rows if row and row[0] in own for column in _BUSY)
        return ticks / os.sysconf("SC_CLK_TCK") if ticks else None
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def quota(system: Path = Path("/")) -> float | None:
    """Cores that the cgroup (version 2) of this process, or one above it, allows; None without a limit."""
    limits = []
    try:
        groups = (system / "proc/self/cgroup").read_text("utf-8").splitlines()
        path = next((line.removeprefix("0::/") for line in groups if line.startswith("0::/")), None)
        root = system / "sys/fs/cgroup"
        for folder in () if path is None else (root / path, *(root / path).parents):
            if (folder / "cpu.max").exists():
                allowed, period = (folder / "cpu.max").read_text("ascii").split()
                limits += [int(allowed) / int(period)] if allowed != "max" else []
            if folder == root:
                break
    except (OSError, ValueError):
        return None
    return min(limits, default=None)


def _beyond(number: int) -> str:
    there = cores()
    return f"; there {'is' if there == 1 else 'are'} only {count(there, 'core')}" if number > there else ""

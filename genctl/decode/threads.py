"""The number of threads, from the work of a step and the cores.

A second thread helps only if both have enough to do. In a small model threads wait for each other longer than they
compute.
"""

from __future__ import annotations

import os
from pathlib import Path

from genctl.errors import count, size

TEXT = 32  # about as many tokens are computed at once when a whole text is read
SHARE = 20 << 20  # bytes of weights that a thread reads in about a millisecond, against a loss of some µs per product
LEAST = 5 * SHARE  # the least work for a second thread: two threads that wait for each other may cost much
_ROWS = 5  # as many rows take a second as long to multiply as the weights take to read
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
    """The number of threads of a job.

    `given` is the knob `threads`. Without it an environment variable decides, and without both the work and the cores,
    of which a worker has a `share`. Ranks keep what their launcher has set: all of them must compute alike.
    """

    def __init__(self, given: int | None = None, *, share: int | None = None) -> None:
        self.number: int | None = None  # None: torch's own
        self.reason = ""
        self.fixed = True
        self._share = share
        variable = from_environment() if share is None else None
        if given is not None:
            self.number, self.reason = given, "as set"
        elif variable is not None:
            self.number, self.reason = variable
        elif share is None and "WORLD_SIZE" in os.environ:
            self.reason = "one of several ranks"
        else:
            self.fixed = False

    def apply(self, weights: int, rows: int = 1, *, device: str = "cpu", recorded: int | None = None) -> None:
        """Set torch's threads for steps of this many rows. `recorded`: the number with which an output began.

        On another device than the CPU torch keeps its own number, unless one is given.
        """
        if self.fixed:
            pass
        elif recorded is not None:
            self.number, self.reason = recorded, "as the output was begun"
        elif device != "cpu":
            self.number, self.reason = None, f"torch's own beside {device}"
        else:
            there = self._share or cores()
            self.number = min(for_step(weights, rows), there)
            self.reason = f"{count(there, 'core')}, {size(weights)} of weights, {count(rows, 'row')} at a step"
        if self.number is not None:
            set_threads(self.number)

    @property
    def note(self) -> str:
        """What was chosen and why, for --verbose."""
        import torch

        return f"threads: {self.number or torch.get_num_threads()} ({self.reason})"


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

"""Locks of files that a run writes: two runs never write one path at the same time.

A run locks the regular file that it writes (`flock`), the file that it is going to replace, and the journal of its
output. The system releases a lock when the process ends, however it ends. Where the system or the file system has no
such locks, nothing is locked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from genctl.errors import UsageError, printable

try:
    import fcntl
except ImportError:  # a system without locks of this kind
    fcntl = None  # type: ignore[assignment]

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
CLOEXEC = getattr(os, "O_CLOEXEC", 0)
JOURNAL = ".journal"  # the suffix of an output's journal


class NotOurs(Exception):
    """What is wrong with a file that is there: a phrase that follows its name."""


def open_regular(path: Path, flags: int = os.O_RDWR, mode: int = 0o666) -> int:
    """Open a regular file, to continue or to read what it holds; links are not followed. Returns the descriptor.

    Raises NotOurs for a link or anything else that is no regular file, OSError and ValueError as `os.open`.
    """
    try:
        # opening a pipe under this name must not block
        descriptor = os.open(path, flags | NOFOLLOW | CLOEXEC | getattr(os, "O_NONBLOCK", 0), mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise NotOurs("is a link, and links are not followed") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotOurs("is not a regular file")
    return descriptor


def lock(descriptor: int, path: Path) -> None:
    """Lock an open file. Raises UsageError, after closing it, if another run has locked it. `path` names it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(f"{printable(str(path))} is locked by another genctl process") from None
    except OSError:  # a file system without locks
        return


def lock_existing(path: Path, name: Path | None = None) -> int | None:
    """Lock a regular file that exists. Returns a descriptor that keeps the lock; None if there is nothing to lock.

    Raises UsageError if another run has locked it; `name` is the path for the message.
    """
    for flags in (os.O_RDONLY, os.O_WRONLY):
        with contextlib.suppress(OSError, NotOurs):
            descriptor = open_regular(path, flags)
            lock(descriptor, name or path)
            return descriptor
    return None


def check_journal(output: Path) -> None:
    """Raises UsageError if a run with --resume is at work on this output, which it may not have opened yet."""
    with contextlib.suppress(ValueError):
        descriptor = lock_existing(output.with_name(output.name + JOURNAL), output)
        if descriptor is not None:
            os.close(descriptor)


class Replaced:
    """The file that a new one is to replace: its state when we began. It is locked if it is a regular file."""

    def __init__(self, path: Path, state: os.stat_result) -> None:
        self.state = state
        self._held = lock_existing(path)

    def release(self) -> None:
        """Unlock it."""
        if self._held is not None:
            os.close(self._held)
        self._held = None


def stat_of(path: Path) -> os.stat_result | None:
    """What is at `path`, a link itself; None if there is nothing. Raises OSError."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None

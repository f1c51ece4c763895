"""A sink: each record is written completely or not at all, and changes to the file by other programs are detected.

Two runs never write one path at the same time: a run locks the regular file that it writes (`flock`), the file that it
is going to replace, and the journal of its output. The system releases a lock when the process ends, however it ends.
Where the system or the file system has no such locks, nothing is locked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, Protocol

from genctl.errors import OutputError, UsageError, printable

_PIECE = 2**20  # bytes read at once
LOOK_S = 1.0  # between two checks that our file is still in its place


class Raw(Protocol):
    """The target of a sink: an unbuffered file or similar. A write may be short (None: would block)."""

    def write(self, data: memoryview, /) -> int | None: ...


class Sink:
    """Writes complete records. `owned` is the descriptor of a regular file that we opened and may cut, else None.

    If a write fails, our file is cut back to its last complete record, and every further write fails the same way. If a
    signal's exception interrupts a write, `close` (or the next write) completes that record. `whole` is the number of
    bytes of the file that are already complete.

    If another program removes, replaces or changes our file, the next write after at most `LOOK_S`, `sync` or
    `close` fails, and the file is left unchanged.
    """

    def __init__(
        self,
        raw: Raw,
        name: str,
        *,
        owned: int | None = None,
        path: Path | None = None,
        part: Path | None = None,
        replaces: Replaced | None = None,
        whole: int = 0,
    ) -> None:
        self.name = name
        self._failure: Exception | None = None
        self._raw = raw
        self._owned = owned
        self._path = path  # None for a stream that was already open
        self._part = part  # the file beside `path` that replaces it at the end
        self._replaces = replaces
        self._pending = memoryview(b"")
        self._sent = 0  # bytes of `_pending`
        self._whole = whole  # bytes of all records before `_pending`
        self._closed = False
        self._lost = False  # another program has changed or replaced our file
        self._checked_at = time.monotonic()

    @property
    def is_terminal(self) -> bool:
        """Whether the output is a terminal."""
        isatty = getattr(self._raw, "isatty", None)
        return isatty is not None and bool(isatty())

    @property
    def path(self) -> Path | None:
        """The path of the output, now or once it is closed; None for a stream that was already open."""
        return self._path

    @property
    def replaces(self) -> bool:
        """Whether this file is to replace an existing one."""
        return self._part is not None and self._replaces is not None

    @property
    def whole(self) -> int:
        """The bytes of complete records."""
        return self._whole

    @property
    def size(self) -> int:
        """The size of our file in bytes, with incomplete records."""
        return 0 if self._owned is None else os.fstat(self._owned).st_size

    def write(self, data: bytes) -> None:
        """Write one record. Raises OutputError, or BrokenPipeError if the reader of a pipe is gone."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise ValueError("the sink is closed")
        self._finish_interrupted()
        if time.monotonic() - self._checked_at >= LOOK_S:
            self._check_place()
        self._pending, self._sent = memoryview(data), 0
        self._drain()

    def close(self) -> None:
        """Complete the output. With --force the new file replaces the old one now. Raises like `write`."""
        if self._closed:
            return
        if self._failure is not None:
            self.abandon()
            return
        self._finish_interrupted()
        try:
            if self._part is None:
                self._check_place()
            else:
                self.put_in_place()
        except OutputError:
            self.abandon()
            raise
        self._closed = True
        if self._path is None:
            return
        try:
            self._close_raw()
        except OSError as error:
            self._fail(error)

    def put_in_place(self) -> None:
        """Replace `path` with the new file beside it, then continue writing to that. Raises OutputError.

        The new file is flushed to the disk first, so even a power cut leaves the old file or the new one.
        """
        if self._part is None or self._path is None:
            return
        self.sync()
        try:
            self._replace(self._part, self._path)
        except OSError as error:
            self._fail(error)
        self._part = None
        sync_folder(self._path)
        if self._replaces is not None:
            self._replaces.release()

    def abandon(self, *, keep: bool = True) -> None:
        """After an error: keep complete records, but remove an empty file, which would block the next run.

        Without `keep`, a new file that has not been put in place yet is removed even if it has records.
        """
        if self._closed:
            return
        self._closed = True
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # an error is already being reported
            self._cut()
            mine = self._part or self._path
            # remove it only if it is still the same file
            useless = not self._whole or (self._part is not None and not keep)
            ours = self._owned is not None and not self._lost
            if ours and useless and os.path.samestat(mine.lstat(), os.fstat(self._owned or -1)):
                mine.unlink()
        with contextlib.suppress(OSError):
            self._close_raw()

    def leave(self) -> None:
        """Close the file without changing it."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._close_raw()

    def cut_back(self) -> None:
        """Cut our file back to its complete records. Raises OutputError."""
        try:
            self._cut()
        except OSError as error:
            self._fail(error)

    def retry(self) -> None:
        """Clear a failure and cut back to complete records, since the disk may have room again. Raises OutputError."""
        if self._lost or self._closed:
            return
        self._failure = None
        self.cut_back()

    def sync(self) -> None:
        """Flush our file to the disk. Raises OutputError."""
        if self._failure is not None:
            raise self._failure
        if self._owned is None:
            return
        self._check_place()
        try:
            os.fsync(self._owned)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without fsync
                self._fail(error)

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes of our file from `start` to `end`, in pieces; fewer if it is shorter."""
        assert self._owned is not None
        while start < end:
            try:
                piece = os.pread(self._owned, min(end - start, _PIECE), start)
            except OSError as error:
                self._fail(error)
            if not piece:
                return
            start += len(piece)
            yield piece

    def _check_place(self) -> None:
        """Raises OutputError if our file is no longer in its place, or has another size than we wrote."""
        self._checked_at = time.monotonic()
        if self._owned is None or self._path is None:
            return
        try:
            mine = os.fstat(self._owned)
            there = stat_of(self._path) if self._part is None else self._part.lstat()
        except OSError as error:
            self._fail(error)
        if there is None:
            what = "removed"
        elif not os.path.samestat(there, mine):
            what = "replaced"
        elif mine.st_size != self._whole:
            what = "changed"
        else:
            return
        self._lost = True
        name = self.name if self._part is None else printable(str(self._part))
        self._failure = OutputError(f"{name} was {what} by another program while this run was writing it")
        raise self._failure

    def _replace(self, part: Path, path: Path) -> None:
        """Replace the file that was there when we began, or create it if there was none."""
        there = stat_of(path)
        before = None if self._replaces is None else self._replaces.state
        if there is None or (before is not None and os.path.samestat(there, before)):
            part.replace(path)
            return
        what = "made" if before is None else "replaced"
        results = f"; the results of this run are in {printable(str(part))}" if self._whole else ""
        self._failure = OutputError(
            f"{self.name} was {what} by another program during this run", hint=f"it is left as it is{results}"
        )
        raise self._failure

    def _finish_interrupted(self) -> None:
        if not self._pending:
            return
        self._cut()
        if self._owned is not None:
            self._sent = 0
        self._drain()

    def _drain(self) -> None:
        try:
            while self._sent < len(self._pending):
                try:
                    count = self._raw.write(self._pending[self._sent :])
                except InterruptedError:
                    continue
                if count is None:
                    self._wait()
                elif count > 0:
                    self._sent += count
                else:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            if flush := getattr(self._raw, "flush", None):
                flush()
        except BrokenPipeError as error:
            self._failure = error
            self._pending = memoryview(b"")
            raise
        except OSError as error:
            self._fail(error)
        self._whole += self._sent
        self._pending = memoryview(b"")

    def _wait(self) -> None:
        """Wait until a non-blocking pipe has room."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._raw, selectors.EVENT_WRITE)  # type: ignore[arg-type]
            selector.select()

    def _cut(self) -> None:
        if self._owned is not None and not self._lost:
            os.ftruncate(self._owned, self._whole)
            os.lseek(self._owned, self._whole, os.SEEK_SET)

    def _close_raw(self) -> None:
        if self._replaces is not None:
            self._replaces.release()
        if close := getattr(self._raw, "close", None):
            close()

    def _fail(self, error: OSError) -> NoReturn:
        self._pending = memoryview(b"")
        with contextlib.suppress(OSError):  # the disk fails; the first error is reported
            if not self._closed:
                self._cut()
        hint = ""
        if self._part is not None:
            as_it_was = [f"{self.name} is as it was"] if self._replaces is not None else []
            finished = [f"what was finished is in {printable(str(self._part))}"] if self._whole else []
            hint = "; ".join(as_it_was + finished)
        self._failure = unwritten(system_reason(error), self.name, hint)
        raise self._failure from error


def sync_folder(path: Path) -> None:
    """Flush a file's name to the disk, as far as the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path.absolute().parent, os.O_RDONLY | CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def system_reason(error: OSError | ValueError) -> str:
    """The system's message for an error, else the error's own."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def unwritten(reason: str, name: str, hint: str = "") -> OutputError:
    """The error for an output that cannot be written."""
    return OutputError(f"the output could not be written: {reason} ({name})", hint=hint)


try:
    import fcntl
except ImportError:  # a system without locks of this kind
    fcntl = None  # type: ignore[assignment]

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
CLOEXEC = getattr(os, "O_CLOEXEC", 0)
JOURNAL = ".journal"  # the suffix of an output's journal


class NotOurs(Exception):
    """Why an existing file cannot be used: a phrase that follows its name."""


def open_regular(path: Path, flags: int = os.O_RDWR, mode: int = 0o666) -> int:
    """Open a regular file, to continue or to read it; links are not followed. Returns the descriptor.

    Raises NotOurs for a link or anything else but a regular file, and OSError and ValueError as `os.open` does.
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
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except (OSError, ValueError, NotOurs):
        return None
    lock(descriptor, name or path)
    return descriptor


def check_journal(output: Path) -> None:
    """Raises UsageError if a run with --resume holds this output's journal; it may not have opened the output yet."""
    descriptor = lock_existing(output.with_name(output.name + JOURNAL), output)
    if descriptor is not None:
        os.close(descriptor)


class Replaced:
    """The file that a new one will replace, with its state when we began. It is locked if it is a regular file."""

    def __init__(self, path: Path, state: os.stat_result) -> None:
        self.state = state
        self._held = lock_existing(path)

    def release(self) -> None:
        """Unlock it."""
        if self._held is not None:
            os.close(self._held)
        self._held = None


def stat_of(path: Path) -> os.stat_result | None:
    """The status of `path`, without following a link; None if it does not exist. Raises OSError."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None

"""The output: standard output or a file. Each record is written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from genctl.batch.printable import printable
from genctl.errors import OutputError

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOEXEC
_STREAM = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOCTTY", 0) | CLOEXEC

# Names in here stand for streams that are already open; a file behind one of them is never replaced.
_STREAM_FOLDERS = {Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd")}


_PIECE = 2**20  # bytes read at once


class Raw(Protocol):
    """What a sink writes to: an unbuffered file or similar. A write may be short (None: not now)."""

    def write(self, data: memoryview, /) -> int | None: ...


class Sink:
    """Writes whole records. `owned` is the descriptor of a regular file that we created and may cut, else None.

    If a write fails, our file is cut back to its last whole record, and every further write fails the same way. If a
    signal's exception interrupts a write, `close` (or the next write) completes that record. `whole` is how many bytes
    of the file are already complete.
    """

    def __init__(
        self,
        raw: Raw,
        name: str,
        *,
        owned: int | None = None,
        path: Path | None = None,
        part: Path | None = None,
        whole: int = 0,
    ) -> None:
        self.name = name
        self._failure: Exception | None = None
        self._raw = raw
        self._owned = owned
        self._path = path  # None for a stream that was open before
        self._part = part  # the file beside `path` that replaces it at the end
        self._pending = memoryview(b"")
        self._sent = 0  # bytes of `_pending`
        self._whole = whole  # bytes of all records before `_pending`
        self._closed = False

    @property
    def is_terminal(self) -> bool:
        """Whether the output is a terminal."""
        isatty = getattr(self._raw, "isatty", None)
        return isatty is not None and bool(isatty())

    def write(self, data: bytes) -> None:
        """Write one record. Raises OutputError, or BrokenPipeError if the reader of a pipe is gone."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise ValueError("the sink is closed")
        self._finish_interrupted()
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
        self._closed = True
        if self._path is None:
            return
        try:
            if self._part is not None and self._owned is not None:
                os.fsync(self._owned)  # else a power cut could leave an empty file
            self._close_raw()
            if self._part is not None:
                self._part.replace(self._path)
        except OSError as error:
            self._fail(error)

    def abandon(self) -> None:
        """After an error: keep what was written completely, but no empty file that would block the next run."""
        if self._closed:
            return
        self._closed = True
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # an error is already being reported
            self._cut()
            mine = self._part or self._path
            # Only if it is still the same file.
            if self._owned is not None and not self._whole and os.path.samestat(mine.lstat(), os.fstat(self._owned)):
                mine.unlink()
        with contextlib.suppress(OSError):
            self._close_raw()

    def leave(self) -> None:
        """Close the file as it is."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._close_raw()

    def cut_back(self) -> None:
        """Cut our file back to its whole records. Raises OutputError."""
        try:
            self._cut()
        except OSError as error:
            self._fail(error)

    def sync(self) -> None:
        """Flush our file to the disk. Raises OutputError."""
        if self._failure is not None:
            raise self._failure
        if self._owned is None:
            return
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
        if self._owned is not None:
            os.ftruncate(self._owned, self._whole)
            os.lseek(self._owned, self._whole, os.SEEK_SET)

    def _close_raw(self) -> None:
        if close := getattr(self._raw, "close", None):
            close()

    def _fail(self, error: OSError) -> NoReturn:
        self._pending = memoryview(b"")
        with contextlib.suppress(OSError):  # the disk fails; the first error is reported
            if not self._closed:
                self._cut()
        hint = ""
        if self._part is not None and self._path is not None:
            hint = f"{self.name} is as it was"
            if self._whole:
                hint += f"; what was finished is in {printable(str(self._part))}"
        self._failure = _unwritable(_reason(error), self.name, hint)
        raise self._failure from error


def open_output(
    path: str | Path | None, stdout: IO[bytes] | IO[str] | None, *, force: bool = False, at_once: bool = False
) -> Sink:
    """Open `--output` (None or "-": standard output).

    An existing file is refused without `force`. With it, records go to a new file beside it that replaces it at
    `close`, so that neither a crash nor a full disk destroys the old one; the mode is kept. Links are never followed to
    a regular file: they are refused, or with `force` replaced. Devices and pipes are opened, and a name of standard
    output itself (/dev/stdout) is standard output. With `at_once` a file that is not there appears when it is whole,
    at `close`. Raises OutputError.
    """
    if path is None or str(path) == "-":
        return _standard_output(stdout)
    target, name = Path(path), printable(str(path))
    try:
        there = target.stat()
    except FileNotFoundError:
        there = None
    except (OSError, ValueError) as error:
        raise _unwritable(_reason(error), name) from None
    try:
        if there is not None:
            if stat.S_ISDIR(there.st_mode):
                raise _unwritable("it is a folder", name)
            if _is_open_as(stdout, there):
                return _standard_output(stdout)
            if (
                stat.S_ISCHR(there.st_mode)
                or stat.S_ISFIFO(there.st_mode)
                or target.absolute().parent in _STREAM_FOLDERS
            ):
                return Sink(unbuffered(os.open(target, _STREAM)), name, path=target)
            if not stat.S_ISREG(there.st_mode):
                raise _unwritable("it is not a regular file", name)
        if at_once and there is None and not target.is_symlink():
            return _replacement(target, name)
        try:
            return _owned(os.open(target, _CREATE, 0o666), name, target)
        except FileExistsError:
            if not force:
                raise OutputError(f"the output exists already: {name}", hint="--force replaces it") from None
        return _replacement(target, name)
    except OSError as error:
        raise unwritable(error, target) from None


def _replacement(target: Path, name: str) -> Sink:
    part = target.with_name(f"{target.name[:40]}.{secrets.token_hex(8)}.part")
    descriptor = os.open(part, _CREATE, 0o666)
    with contextlib.suppress(FileNotFoundError):
        old = target.lstat()
        if stat.S_ISREG(old.st_mode) and hasattr(os, "fchmod"):
            os.fchmod(descriptor, old.st_mode & 0o777)
    return _owned(descriptor, name, target, part)


def reopen(path: Path, whole: int | None) -> Sink:
    """Open a regular file to continue, its first `whole` bytes complete; None: it must not exist, or be empty.

    Nothing is changed yet; see `Sink.cut_back`. Links are not followed. Raises OutputError.
    """
    name = printable(str(path))
    flags = os.O_RDWR | NOFOLLOW | CLOEXEC | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags | (0 if whole is not None else os.O_CREAT), 0o666)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.EMLINK):
            raise _unwritable("it is a link, and links are not followed", name) from None
        raise unwritable(error, path) from None
    state = os.fstat(descriptor)
    wrong = "" if stat.S_ISREG(state.st_mode) else "it is not a regular file"
    if whole is None and state.st_size and not wrong:
        wrong = "the file exists already"
    if wrong:
        os.close(descriptor)
        raise _unwritable(wrong, name)
    return Sink(unbuffered(descriptor), name, owned=descriptor, path=path, whole=whole or 0)


def sync_folder(path: Path) -> None:
    """Flush a file's name to the disk, as far as the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path.absolute().parent, os.O_RDONLY | CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def unwritable(error: OSError | ValueError, path: Path) -> OutputError:
    """The error for a file that cannot be opened for writing."""
    name = printable(str(path))
    if isinstance(error, FileNotFoundError):
        return _unwritable(f"there is no folder {printable(str(path.parent))}", name)
    return _unwritable(_reason(error), name)


def _owned(descriptor: int, name: str, path: Path, part: Path | None = None) -> Sink:
    return Sink(unbuffered(descriptor), name, owned=descriptor, path=path, part=part)


def unbuffered(descriptor: int) -> Raw:
    """An open descriptor for writing."""
    raw: Raw = os.fdopen(descriptor, "wb", buffering=0)
    return raw


def _standard_output(stdout: Any) -> Sink:
    if stdout is None:
        raise OutputError("the output could not be written: standard output is closed")
    try:
        stdout.flush()
        _check_mode(stdout)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _unwritable(_reason(error), "stdout") from error
    binary = getattr(stdout, "buffer", stdout)
    return Sink(getattr(binary, "raw", binary), "stdout")


def _check_mode(stdout: Any) -> None:
    """Raises OSError for a read-only descriptor, before a model is loaded."""
    try:
        import fcntl

        mode = fcntl.fcntl(stdout.fileno(), fcntl.F_GETFL) & os.O_ACCMODE
    except (ImportError, OSError, ValueError, AttributeError):  # not a stream of the system, as in tests
        return
    if mode == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _is_open_as(stdout: Any, there: os.stat_result) -> bool:
    try:
        return os.path.samestat(there, os.fstat(stdout.fileno()))
    except (OSError, ValueError, AttributeError):  # not a stream of the system, as in tests
        return False


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _unwritable(reason: str, name: str, hint: str = "") -> OutputError:
    return OutputError(f"the output could not be written: {reason} ({name})", hint=hint)

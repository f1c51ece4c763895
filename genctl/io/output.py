"""Open outputs: standard output, a device, a new file, or a file to replace or to continue."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import IO, Any

from genctl.errors import OutputError, printable
from genctl.io.sink import (
    CLOEXEC,
    NOFOLLOW,
    NotOurs,
    Raw,
    Replaced,
    check_journal,
    lock,
    open_regular,
    stat_of,
    system_reason,
    unwritten,
)
from genctl.io.sink import Sink as Sink
from genctl.io.sink import sync_folder as sync_folder

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOEXEC
_STREAM = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOCTTY", 0) | CLOEXEC

# Names in these folders are streams that are already open; a file behind one of them is never replaced.
_STREAM_FOLDERS = {Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd")}


def open_output(
    path: str | Path | None, stdout: IO[bytes] | IO[str] | None, *, force: bool = False, at_once: bool = False
) -> Sink:
    """Open `--output` (None or "-": standard output).

    An existing file is refused without `force`. With it, records go to a new file beside it that replaces it at
    `close`, so neither a crash nor a full disk destroys the old one; the mode is kept. Links to a regular file are
    never followed: they are refused, or replaced with `force`. Devices and pipes are opened, and a name of standard
    output itself (/dev/stdout) is standard output. With `at_once` a new file appears only when it is complete,
    at `close`.

    The file is locked until it is closed. Raises OutputError, and UsageError if another run is writing the file.
    """
    if path is None or str(path) == "-":
        return _standard_output(stdout)
    target, name = Path(path), printable(str(path))
    try:
        there = target.stat()
    except FileNotFoundError:
        there = None
    except (OSError, ValueError) as error:
        raise unwritten(system_reason(error), name) from None
    try:
        if there is not None:
            kind = stat.S_IFMT(there.st_mode)
            if kind == stat.S_IFDIR:
                raise unwritten("it is a folder", name)
            is_stdout = False
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor, as in tests
                is_stdout = os.path.samestat(there, os.fstat(stdout.fileno()))  # type: ignore[union-attr]
            if is_stdout:
                return _standard_output(stdout)
            if kind in (stat.S_IFCHR, stat.S_IFIFO) or target.absolute().parent in _STREAM_FOLDERS:
                return Sink(unbuffered(os.open(target, _STREAM)), name, path=target)
            if kind != stat.S_IFREG:
                raise unwritten("it is not a regular file", name)
        check_journal(target)
        if at_once and there is None and not target.is_symlink():
            return _replacement(target, name)
        try:
            descriptor = os.open(target, _CREATE, 0o666)
            lock(descriptor, target)
            return Sink(unbuffered(descriptor), name, owned=descriptor, path=target)
        except FileExistsError:
            if not force:
                raise OutputError(f"the output exists already: {name}", hint="--force replaces it") from None
        return _replacement(target, name)
    except OSError as error:
        raise unwritable(error, target) from None


def open_beside(path: Path, *, force: bool = False) -> Sink:
    """Open a file for its owner alone, to be read and continued later; `Sink.put_in_place` gives it its name.

    An existing file is refused without `force`, and stays until `put_in_place`; a link is replaced, never followed. The
    file is locked until it is closed. Raises OutputError, and UsageError if another run is writing it.
    """
    name = printable(str(path))
    try:
        there = stat_of(path)
        if there is not None and not (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)):
            raise unwritten("it is a folder" if stat.S_ISDIR(there.st_mode) else "it is not a regular file", name)
        if there is not None and not force:
            raise OutputError(f"{name} exists already", hint=f"--open {name} continues what is in it")
        check_journal(path)
        return _replacement(path, name, 0o600)
    except (OSError, ValueError) as error:
        raise unwritable(error, path) from None


def _replacement(target: Path, name: str, mode: int = 0) -> Sink:
    """Open a new file beside `target`. Without `mode` it gets the old file's mode."""
    old = stat_of(target)
    replaces = None if old is None else Replaced(target, old)
    try:
        part = target.with_name(f"{target.name[:40]}.{secrets.token_hex(8)}.part")
        descriptor = os.open(part, _CREATE, mode or 0o666)
        lock(descriptor, target)
    except BaseException:
        if replaces is not None:
            replaces.release()
        raise
    if not mode and old is not None and stat.S_ISREG(old.st_mode) and hasattr(os, "fchmod"):
        os.fchmod(descriptor, old.st_mode & 0o777)
    return Sink(unbuffered(descriptor), name, owned=descriptor, path=target, part=part, replaces=replaces)


def reopen(path: Path, whole: int | None) -> Sink:
    """Open a regular file to continue after its first `whole` bytes; None: it must not exist, or be empty.

    The file is locked but not cut yet; see `Sink.cut_back`. Links are not followed. Raises OutputError, and
    UsageError if another run is writing the file.
    """
    name = printable(str(path))
    try:
        descriptor = open_regular(path, os.O_RDWR | (0 if whole is not None else os.O_CREAT))
    except NotOurs as error:
        raise unwritten(f"it {error}", name) from None
    except (OSError, ValueError) as error:
        raise unwritable(error, path) from None
    if whole is None and os.fstat(descriptor).st_size:
        os.close(descriptor)
        raise unwritten("the file exists already", name)
    lock(descriptor, path)
    return Sink(unbuffered(descriptor), name, owned=descriptor, path=path, whole=whole or 0)


def unwritable(error: OSError | ValueError, path: Path) -> OutputError:
    """The error for a file that cannot be opened for writing."""
    name = printable(str(path))
    if isinstance(error, FileNotFoundError):
        folder = printable(str(path.parent))
        none = f"no file can be made in {folder}" if path.parent.is_dir() else f"there is no folder {folder}"
        return unwritten(none, name)
    return unwritten(system_reason(error), name)


def unbuffered(descriptor: int) -> Raw:
    """An unbuffered file for an open descriptor."""
    raw: Raw = os.fdopen(descriptor, "wb", buffering=0)
    return raw


def _standard_output(stdout: Any) -> Sink:
    if stdout is None:
        raise OutputError("the output could not be written: standard output is closed")
    try:
        stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritten(system_reason(error), "stdout") from error
    binary = getattr(stdout, "buffer", stdout)
    return Sink(getattr(binary, "raw", binary), "stdout")

"""A disk that remembers: what is done to the files of a folder, in order, and what a crash at any point may leave.

A kill leaves everything that was done. A power cut may lose all of a file's data since its last `fsync`, or half of it,
and each change of a name since the last `fsync` of its folder; nothing says that they are lost in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

MOST_NAMES = 6  # changes of names that are lost or not in every combination; earlier ones are kept

Files = Mapping[str, bytes]


@dataclass
class Inode:
    """The data of a file: what is sure to be there after a crash, and what a running system sees."""

    safe: bytes = b""
    seen: bytes = b""

    def after_a_crash(self) -> list[bytes]:
        """What a crash may leave of it."""
        found = [self.seen, self.safe]
        if self.seen.startswith(self.safe):
            found.append(self.seen[: (len(self.safe) + len(self.seen)) // 2])
        return list(dict.fromkeys(found))


@dataclass
class Disk:
    """The files of `folder`. `calls` are the system calls that changed them, `crashes` what each could leave."""

    folder: Path
    calls: list[str] = field(default_factory=list)
    crashes: list[Files] = field(default_factory=list)
    _inodes: dict[int, Inode] = field(default_factory=dict)
    _names: dict[str, int] = field(default_factory=dict)  # that are sure to be there
    _changes: list[dict[str, int | None]] = field(default_factory=list)  # of names, since the folder was flushed
    _seen: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        for path in self.folder.iterdir():
            content, number = path.read_bytes(), path.stat().st_ino
            self._inodes[number] = Inode(content, content)
            self._names[path.name] = number

    @property
    def left(self) -> list[Files]:
        """What a crash may leave now."""
        changes = self._changes[-MOST_NAMES:]
        names = dict(self._names)
        for change in self._changes[:-MOST_NAMES]:
            names |= change  # type: ignore[arg-type]
        found = []
        for kept in product((True, False), repeat=len(changes)):
            here: dict[str, int | None] = {**names}
            for change, there in zip(changes, kept, strict=True):
                here |= change if there else {}
            numbers = sorted({number for number in here.values() if number is not None})
            for contents in product(*(self._inodes[number].after_a_crash() for number in numbers)):
                data = dict(zip(numbers, contents, strict=True))
                found.append({name: data[number] for name, number in here.items() if number is not None})
        return found

    # -- recording -----------------------------------------------------------------------------------------------------

    def _note(self, call: str) -> None:
        self.calls.append(call)
        for files in self.left:
            key = frozenset(files.items())
            if key not in self._seen:
                self._seen.add(key)
                self.crashes.append(files)

    def _name(self, path: Any) -> str | None:
        absolute = Path(os.fsdecode(path)).absolute() if not isinstance(path, int) else None
        return absolute.name if absolute is not None and absolute.parent == self.folder else None

    def _of(self, descriptor: int) -> tuple[int, str]:
        """The number of a file of ours and its name now; 0 for another file."""
        number = os.fstat(descriptor).st_ino
        if number not in self._inodes:
            return 0, ""
        names = [path.name for path in self.folder.iterdir() if path.stat().st_ino == number]
        return number, names[0] if names else "(no name)"

    def _data(self, call: str, descriptor: int) -> None:
        number, name = self._of(descriptor)
        if number:
            seen = (
                os.pread(descriptor, os.fstat(descriptor).st_size, 0)
                if _readable(descriptor)
                else (self.folder / name).read_bytes()
            )
            if seen != self._inodes[number].seen:
                self._inodes[number].seen = seen
                self._note(f"{call} {name}")

    def _renamed(self, call: str, change: dict[str, int | None]) -> None:
        self._changes.append(change)
        self._note(f"{call} {' '.join(change)}")

    @contextmanager
    def recording(self) -> Iterator[Disk]:
        """While this lasts, the calls of this process are recorded."""
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            yield self

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        real = {name: getattr(os, name) for name in ("open", "fsync", "ftruncate", "replace", "rename", "unlink")}
        fdopen = os.fdopen
        disk = self

        def opened(path: Any, flags: int, *more: Any, **names: Any) -> int:
            name = disk._name(path)
            before = name is not None and os.path.lexists(path)
            descriptor = int(real["open"](path, flags, *more, **names))
            if name is not None and not before:
                number = os.fstat(descriptor).st_ino
                disk._inodes[number] = Inode()
                disk._renamed("create", {name: number})
            elif flags & os.O_TRUNC:
                disk._data("truncate", descriptor)
            return descriptor

        def fsync(descriptor: int) -> None:
            real["fsync"](descriptor)
            if os.path.samestat(os.fstat(descriptor), disk.folder.stat()):
                for change in disk._changes:
                    disk._names |= change  # type: ignore[arg-type]
                disk._names = {name: number for name, number in disk._names.items() if number is not None}
                disk._changes.clear()
                disk._note("fsync .")
            elif (found := disk._of(descriptor))[0]:
                disk._inodes[found[0]].safe = disk._inodes[found[0]].seen
                disk._note(f"fsync {found[1]}")

        def ftruncate(descriptor: int, length: int) -> None:
            real["ftruncate"](descriptor, length)
            disk._data("truncate", descriptor)

        def moved(call: str) -> Callable[..., None]:
            def move(source: Any, target: Any, **names: Any) -> None:
                one, other = disk._name(source), disk._name(target)
                number = os.lstat(source).st_ino
                real[call](source, target, **names)
                if one is not None and other is not None:
                    disk._renamed("rename", {one: None, other: number})

            return move

        def unlink(path: Any, **names: Any) -> None:
            real["unlink"](path, **names)
            if (name := disk._name(path)) is not None:
                disk._renamed("unlink", {name: None})

        class File:
            """An open file that records what it writes."""

            def __init__(self, raw: Any) -> None:
                self.raw = raw

            def __getattr__(self, name: str) -> Any:
                return getattr(self.raw, name)

            def __enter__(self) -> File:
                return self

            def __exit__(self, *_: object) -> None:
                self.close()

            def write(self, data: Any) -> Any:
                count = self.raw.write(data)
                disk._data("write", self.raw.fileno())
                return count

            def flush(self) -> None:
                self.raw.flush()
                disk._data("write", self.raw.fileno())

            def close(self) -> None:
                if not self.raw.closed:
                    self.flush()
                self.raw.close()

        def opens(descriptor: int, mode: str = "r", *more: Any, **names: Any) -> Any:
            file = fdopen(descriptor, mode, *more, **names)
            return File(file) if "r" not in mode and disk._of(descriptor)[0] else file

        for name, function in (
            ("open", opened), ("fsync", fsync), ("ftruncate", ftruncate), ("replace", moved("replace")),
            ("rename", moved("rename")), ("unlink", unlink), ("fdopen", opens),
        ):  # fmt: skip
            patch.setattr(os, name, function)


def _readable(descriptor: int) -> bool:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY


def restore(files: Files, folder: Path) -> Path:
    """Make the files that a crash has left; the folder has nothing else."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder

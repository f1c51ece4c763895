"""A cache of digests of large files between runs: one small file in genctl's cache folder.

`$XDG_CACHE_HOME/genctl/digests.json`, else `~/.cache/genctl/digests.json`. It only saves time: if it is damaged, owned
by another user or not writable, files are read again without a message.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from genctl import folders
from genctl.models.stamps import Stamp

SMALLEST = 1 << 20  # bytes; reading smaller files is as fast as the lookup
MOST = 1000  # entries; the oldest go
_KIND = "genctl-digests/1"
_LARGEST = 4 << 20  # bytes of the file
_DIGEST = re.compile("[0-9a-f]{64}")
# A file may be written again with the same time: within a tick of its file system's clock (up to 2 seconds, FAT), or
# through a mapping whose first write set the time. Younger files are not stored.
_SETTLED_S = 30.0


class DigestCache:
    """Digests from earlier runs. Read when constructed, written by `save` if anything was added."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._now = clock()  # before anything is read: later writes are too young
        self._file = _place()
        self._entries = _read(self._file) if self._file is not None else {}
        self._fresh: dict[str, list[Any]] = {}

    def find(self, path: Path, state: Stamp) -> str | None:
        """The digest of a file in this state; None if unknown."""
        entry = self._entries.get(_key(path))
        return str(entry[-1]) if entry is not None and entry[:-1] == list(astuple(state)) else None

    def add(self, path: Path, state: Stamp, digest: str) -> None:
        """Store a digest, unless the file was changed a moment ago."""
        if max(state.modified, state.changed) / 1e9 <= self._now - _SETTLED_S:
            self._fresh[_key(path)] = [*astuple(state), digest]

    def save(self) -> None:
        """Write what was added; failures are ignored."""
        if not self._fresh or self._file is None:
            return
        with contextlib.suppress(OSError, ValueError):
            entries = {key: entry for key, entry in _read(self._file).items() if key not in self._fresh}
            entries |= self._fresh  # the newest are the last
            _write(self._file, dict(list(entries.items())[-MOST:]))


def _place() -> Path | None:
    folder = folders.cache()
    return None if folder is None else folder / "digests.json"


def _key(path: Path) -> str:
    return os.path.realpath(path)


def _read(file: Path) -> dict[str, list[Any]]:
    """The entries; {} for a file that is incomplete, of another user or too large."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        with os.fdopen(descriptor, "rb") as handle:
            state = os.fstat(descriptor)
            foreign = hasattr(os, "geteuid") and state.st_uid != os.geteuid()
            if foreign or not stat.S_ISREG(state.st_mode) or state.st_size > _LARGEST:
                return {}
            content = json.loads(handle.read(_LARGEST + 1))
        entries = content["files"]
        if content["kind"] == _KIND and content["digest"] == _sum(entries) and all(map(_sound, entries.values())):
            return dict(entries)
    return {}


def _write(file: Path, entries: dict[str, list[Any]]) -> None:
    """Replace the file atomically."""
    text = json.dumps({"kind": _KIND, "digest": _sum(entries), "files": entries})
    while len(text) > _LARGEST and entries:
        entries = dict(list(entries.items())[len(entries) // 2 + 1 :])
        text = json.dumps({"kind": _KIND, "digest": _sum(entries), "files": entries})
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=".digests-")  # readable by its owner only
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(descriptor)  # else a power cut could leave half of it under its name
        Path(temporary).replace(file)
    except BaseException:  # Ctrl-C too: remove the temporary file
        Path(temporary).unlink(missing_ok=True)
        raise


def _sum(entries: dict[str, list[Any]]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _sound(entry: Any) -> bool:
    *state, digest = entry
    numbers = len(state) == len(Stamp.__dataclass_fields__) and all(type(value) is int for value in state)
    return numbers and isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None

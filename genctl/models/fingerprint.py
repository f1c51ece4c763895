"""The identity of a checkpoint: one digest of every byte that determines its output.

Weight files are read completely, in parallel. Their digests are cached by path, size, times and inode, so that an
unchanged checkpoint is read once (`digests`).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from genctl.errors import ModelError, reason_of
from genctl.identity import PREFIX
from genctl.models import digests
from genctl.models.stamps import Stamps, stamp, state_of

_CHUNK = 16 << 20  # bytes of one leaf of a file's digest; part of the definition of `PREFIX`
_PIECE = 1 << 20  # bytes read at once
_THREADS = 8


def fingerprint(folder: Path, files: Stamps, *, clock: Callable[[], float] = time.time) -> str:
    """`sha256:` and 64 hex digits over the names and all bytes of `files`, independent of their location.

    Raises ModelError for a file that cannot be read, or that changed since its stamp was taken.
    """
    if not files:
        raise ValueError("a checkpoint that was not checked has no fingerprint")
    paths = {name: folder / name for name in files}
    remembered = digests.DigestCache(clock)
    large = {name for name, entry in files.items() if entry.size >= digests.SMALLEST}
    known = {name: remembered.find(paths[name], files[name]) for name in large}
    digest_of = {name: digest for name, digest in known.items() if digest is not None}
    _check(folder, files)
    digest_of |= _digests({name: (path, files[name].size) for name, path in paths.items() if name not in digest_of})
    _check(folder, files)
    for name in sorted(large):
        if known[name] is None:
            remembered.add(paths[name], files[name], digest_of[name])
    remembered.save()
    whole = hashlib.sha256()
    for name in sorted(digest_of):
        whole.update(f"{name}\0{files[name].size}\0{digest_of[name]}\n".encode())
    return PREFIX + whole.hexdigest()


def _check(folder: Path, files: Stamps) -> None:
    for name, before in files.items():
        state = state_of(folder / name)
        if state is None or stamp(state) != before:
            raise ModelError(f"{name} in {folder} has changed since it was read")


def _digests(files: Mapping[str, tuple[Path, int]]) -> dict[str, str]:
    """sha256 (hex) over the sha256 of each 16 MiB of each file, so that one large file uses several cores."""
    starts = [(name, path, at) for name, (path, size) in files.items() for at in range(0, max(size, 1), _CHUNK)]
    wholes = {name: hashlib.sha256() for name in files}
    workers = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1, max(len(starts), 1)))
    try:
        leaves = workers.map(lambda start: _leaf(start[1], start[2]), starts)
        for (name, _, _), leaf in zip(starts, leaves, strict=True):
            wholes[name].update(leaf)
    finally:
        workers.shutdown(cancel_futures=True)  # after an interrupt wait only for leaves that are being read
    return {name: whole.hexdigest() for name, whole in wholes.items()}


def _leaf(path: Path, start: int) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
    left = _CHUNK
    try:
        # read, not mapped: if another process truncates a mapped file, this process is killed
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while left and (count := file.readinto(buffer[: min(left, _PIECE)])):
                digest.update(buffer[:count])
                left -= count
    except OSError as error:
        raise ModelError(f"cannot read {path.name}: {reason_of(error)}") from error
    return digest.digest()

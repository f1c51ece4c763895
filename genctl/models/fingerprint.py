"""The identity of a checkpoint: one digest of every byte that determines its output.

Weight files are read completely, in parallel. The digest is cached by folder, sizes, times and inodes, so that an
unchanged checkpoint is read once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from genctl import process
from genctl.errors import FINGERPRINT, ModelError, reason_of

Stamps: TypeAlias = Mapping[str, "Stamp"]  # the name of a file inside the checkpoint -> size, times and inode


# Files that libraries read beside the weights: configs (nested and processors' too), vocabularies under all names that
# transformers' tokenizers use, chat templates, the index of shards. Results of a run in the same folder do not count.
_NAMES = re.compile(
    r".*(config|token|vocab|merges|sentencepiece|tekken|normalizer|emoji|byte_maps|word_shape|word_pronunciation).*"
    r"\.(json|txt)"
    r"|chat_template.*\.json|dict\.txt|.*\.index\.json"
    r"|.*\.(jinja|model|spm|codes|tiktoken|tokenizer)"
)
_TEMPLATES = "additional_chat_templates"  # transformers' folder for further templates


class Stamp(NamedTuple):
    """The state of a file from its metadata. Times in nanoseconds; `changed` cannot be set back."""

    size: int
    modified: int
    changed: int
    inode: int
    device: int


def stamp(path: Path) -> Stamp | None:
    """The state of a regular file; None if there is none."""
    try:
        state = path.stat()
    except OSError:
        return None
    stamped = Stamp(state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev)
    return stamped if stat.S_ISREG(state.st_mode) else None


def stamps(folder: Path, weights: Iterable[Path], *, code: bool) -> Stamps:
    """Every file that counts, with its current state. `code`: the checkpoint's Python files count too."""
    paths = {path.name: path for path in weights}
    for path in folder.iterdir():
        if _NAMES.fullmatch(path.name):
            paths[path.name] = path
    for path in folder.glob(f"{_TEMPLATES}/*.jinja"):
        paths[path.relative_to(folder).as_posix()] = path
    if code:
        for pattern in ("*.py", "*/*.py"):
            paths |= {path.relative_to(folder).as_posix(): path for path in folder.glob(pattern)}
    states = {name: stamp(path) for name, path in sorted(paths.items())}
    return {name: state for name, state in states.items() if state is not None}


# -- the digest --------------------------------------------------------------------------------------------------------

# A file may be written again with the same time: within a tick of its file system's clock (up to 2 seconds, FAT), or
# through a mapping whose first write set the time. The digest of younger files is not stored.
_SETTLED_S = 30.0
_CHUNK = 16 << 20  # bytes of one leaf of a file's digest; part of the definition of `FINGERPRINT`
_PIECE = 1 << 20  # bytes read at once
_THREADS = 8


def fingerprint(folder: Path, files: Stamps, *, clock: Callable[[], float] = time.time) -> str:
    """`sha256:` and 64 hex digits over the names and all bytes of `files`, independent of their location.

    A file in genctl's cache folder, named by the folder and the stamps, caches it. That only saves time: if the file is
    damaged, or cannot be written, the checkpoint is read again without a message. Raises ModelError for a file that
    cannot be read, or that changed since its stamp was taken.
    """
    if not files:
        raise ValueError("a checkpoint that was not checked has no fingerprint")
    began = clock()  # later writes are too young to be stored
    home = process.cache_folder()
    state = json.dumps([os.path.realpath(folder), sorted(files.items())])
    stored = None if home is None else home / "digests" / hashlib.sha256(state.encode()).hexdigest()
    _check(folder, files)
    with suppress(OSError, ValueError):
        if stored is not None and re.fullmatch(f"{FINGERPRINT}[0-9a-f]{{64}}", known := stored.read_text()):
            return known
    digest_of = _digests({name: (folder / name, entry.size) for name, entry in files.items()})
    _check(folder, files)
    whole = hashlib.sha256()
    for name in sorted(digest_of):
        whole.update(f"{name}\0{files[name].size}\0{digest_of[name]}\n".encode())
    found = FINGERPRINT + whole.hexdigest()
    newest = max(max(entry.modified, entry.changed) for entry in files.values())
    if stored is not None and newest / 1e9 <= began - _SETTLED_S:
        with suppress(OSError, ValueError):
            stored.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            stored.write_text(found)  # a truncated file counts as damaged
    return found


def _check(folder: Path, files: Stamps) -> None:
    for name, before in files.items():
        if stamp(folder / name) != before:
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
        workers.shutdown(cancel_futures=True)  # after an interrupt, only wait for leaves that are being read
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

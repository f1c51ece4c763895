"""The files of a checkpoint that determine its output, each with the state it is in (`fingerprint` reads them)."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

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


@dataclass(frozen=True)
class Stamp:
    """The state of a file from its metadata. Times in nanoseconds; `changed` cannot be set back."""

    size: int
    modified: int
    changed: int
    inode: int
    device: int


def stamp(state: os.stat_result) -> Stamp:
    """The stamp of a file's state."""
    return Stamp(state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev)


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
    states = {name: state_of(path) for name, path in sorted(paths.items())}
    return {name: stamp(state) for name, state in states.items() if state is not None}


def state_of(path: Path) -> os.stat_result | None:
    """The state of a regular file; None if there is none."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state if stat.S_ISREG(state.st_mode) else None

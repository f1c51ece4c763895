"""Whether --resume continues the same job: the job as the journal keeps it, and what has changed since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from genctl import __version__
from genctl.batch import writers
from genctl.batch.records import SCHEMA
from genctl.batch.resumable import Resumable
from genctl.cli.run_options import RunOptions
from genctl.config.dry import settings_of
from genctl.config.layers import Resolved
from genctl.errors import UsageError
from genctl.identity import brief, is_outdated

APART = ("seed", "offline")  # settings that are kept elsewhere, or change no result
IN_FILES = ("json_schema", "grammar", "prompt_cache")  # settings that may name a file
_SHORT = 40  # characters of a value in a sentence


@dataclass(frozen=True)
class OutputIdentity:
    """Everything that decides the bytes of an output."""

    seed: int
    seed_given: bool  # whether a seed is set; else it is the seed that the job began with
    settings: Mapping[str, Any]
    files: Mapping[str, str]
    checkpoints: Mapping[str, str]
    format: str
    records: Mapping[str, Any]
    batch: Mapping[str, int]
    input: Mapping[str, Any] | None
    versions: Mapping[str, str]
    origins: Mapping[str, str] = field(default_factory=dict)

    def header(self) -> dict[str, Any]:
        """The header of the journal: plain JSON, without origins."""
        header = {key: value for key, value in vars(self).items() if key not in ("seed_given", "origins")}
        plain: dict[str, Any] = json.loads(json.dumps(header))
        return plain


def identity(
    options: RunOptions,
    resolved: Resolved,
    *,
    seed: int,
    checkpoints: Mapping[str, str],
    batch: Mapping[str, int],
    input: Mapping[str, Any] | None,
    top: int,
    watch: Sequence[int] = (),
) -> OutputIdentity:
    """The identity of the job as it is now. `checkpoints`: fingerprints by name. `input`: what the input file holds."""
    settings = {key: value for key, value in settings_of(resolved).items() if key not in APART}
    for key in ("processors", "stopping"):
        if (listed := getattr(resolved, key)) is not None:
            settings[key] = listed
    records = {
        "echo": bool(options.echo),
        "template": None if options.prompt_template is None else options.prompt_template.text,
        "tokens": options.with_tokens,
        "top": top,
        "explain": options.explain,
        "fail_on": sorted(options.fail_on),
        **({"watch": list(watch)} if watch else {}),
    }
    return OutputIdentity(
        seed=seed,
        seed_given=resolved.runtime.seed is not None,
        settings=settings,
        files={key: digest for key in IN_FILES if (digest := _digest(settings.get(key)))},
        checkpoints=checkpoints,
        format=options.format,
        records=records,
        batch=batch,
        input=input,
        versions={"genctl": __version__, "schema": SCHEMA, **{name: _version(name) for name in _COUNTED}},
        origins=resolved.origins,
    )


_COUNTED = ("torch", "transformers", "tokenizers")  # their versions decide the last digits


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _digest(value: Any) -> str:
    """The digest of the file that a setting names, or an empty string."""
    if not isinstance(value, str):
        return ""
    try:
        return hashlib.blake2b(Path(value).expanduser().read_bytes(), digest_size=16).hexdigest()
    except (OSError, ValueError, RuntimeError):
        return ""


def check_same(name: str, before: Mapping[str, Any], now: OutputIdentity) -> OutputIdentity:
    """`now`, with the seed that the job began with. Raises UsageError with everything that has changed."""
    if not now.seed_given and isinstance(before.get("seed"), int):
        now = replace(now, seed=before["seed"])
    changes = differences(before, now.header(), now.origins)
    if changes:
        raise UsageError(
            f"{name} cannot be resumed: " + "; ".join(changes),
            hint="ask the same as before, or give another --output; --force instead of --resume starts anew",
        )
    return now


def differences(before: Mapping[str, Any], now: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """What differs between two headers, in words: old → new where that is short."""

    def setting(key: str, old: Any, new: Any) -> str:
        place = origins.get(key, "default")
        return _change(key, old, new) + (f" ({place})" if place != "default" else "")

    sentences: dict[str, Callable[[str, Any, Any], str]] = {
        "versions": _change,
        "settings": setting,
        "seed": _change,
        "format": lambda key, old, new: _change("--format", old, new),
        "records": lambda key, old, new: _change(_FLAGS.get(key, key), old, new),
        "checkpoints": _checkpoint,
        "files": lambda key, old, new: f"the file that {key} names has changed",
    }
    changes = []
    for part, sentence in sentences.items():
        old, new = (value if isinstance(value := header.get(part), dict) else {part: value} for header in (before, now))
        keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
        changes += [sentence(key, old.get(key), new.get(key)) for key in keys]
    if not any(changes) and before.get("batch") != now["batch"]:
        changes.append(_change("rows decoded together", before.get("batch"), now["batch"]))
    return [change for change in changes if change]  # the input is compared row by row (see `Resumable.consume`)


_FLAGS = {
    "echo": "--echo",
    "template": "--template",
    "tokens": "--scores",
    "top": "--top-logprobs",
    "explain": "--explain",
    "watch": "--watch",
    "fail_on": "--fail-on",
}


def _change(key: str, old: Any, new: Any) -> str:
    return f"{key} {_words(old)} → {_words(new)}"


def _words(value: Any) -> str:
    if value is None:
        return "unset"
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= _SHORT else text[: _SHORT - 1] + "…"


def _checkpoint(name: str, old: Any, new: Any) -> str:
    if old is None or new is None:
        return ""  # another name is another setting, which is listed already
    if is_outdated(old):
        return (
            "it was begun with a version of genctl that did not look at all bytes of a checkpoint, so nobody can tell "
            f"whether {name} is still the same"
        )
    return f"the checkpoint {name} has changed ({brief(old)} → {brief(new)})"


class Echo:
    """Rows that an earlier run has written and that are decoded again beside the rows that follow.

    What a row's numbers are in their last digits depends on the rows that were computed with it; decoding the same rows
    together gives the same bytes. Whether it did is looked at here.
    """

    def __init__(self, file: Resumable, format: writers.Format, start: int, end: int) -> None:
        self._file, self._start, self._end = file, start, end
        self._digest = hashlib.blake2b(digest_size=16)
        writer = writers.open_writer(
            format, Unclosed(self._digest.update), on_error=lambda record: None, begun=start > 0
        )
        self._ordered = writers.Ordered(writer, start=start, written=self._seen)
        self.differs = False

    def put(self, index: int, records: Sequence[writers.Record]) -> None:
        """Take the records of a row of this run."""
        self._ordered.put(index, records)

    def _seen(self, index: int, records: Sequence[writers.Record]) -> None:
        if index + 1 == self._end:
            marks = self._file.journal.marks
            start = next((mark.bytes for mark in reversed(marks) if mark.rows == self._start), 0)
            self.differs = self._file.digest_of(start, marks[-1].bytes) != self._digest.hexdigest()


class Unclosed:
    """A sink or a writer whose `close` does nothing, because somebody else closes it."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        self._write = write

    def write(self, piece: Any) -> None:
        self._write(piece)

    def close(self) -> None:
        pass

"""The journal of a resumable batch: its settings, and how much of the output is complete.

`OUTPUT.journal` holds JSON lines. The first is the header: the settings, so that a later run can check that its own are
equal. Every further line is a mark: the output's first `bytes` bytes are the whole records of the first `rows` input
rows. See `resumable` for when a mark may be written.

The file is readable by its owner only, is never a link, and is locked during a run. It holds digests and settings, but
no prompts and no texts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

from genctl.documents import reader
from genctl.documents.reader import Unreadable
from genctl.documents.shapes import Natural, value_of
from genctl.errors import UsageError, printable
from genctl.io.file_lock import CLOEXEC, JOURNAL, NOFOLLOW, NotOurs, lock, open_regular
from genctl.io.output import Sink, sync_folder, unbuffered, unwritable

KIND = "genctl-journal/1"
DIGEST = 8  # hex digits of a row's own digest: `Mark.input` is what is relied on
_ANEW = "give another --output; or remove the journal and its output to start over"


class JournalHeader(TypedDict, total=False):
    """What is read of the header. There is more, which is compared with that of the next run."""

    seed: int | None
    settings: dict[str, Any]
    files: dict[str, Any]
    checkpoints: dict[str, Any]
    records: dict[str, Any]
    batch: dict[str, Any]
    input: dict[str, Any] | None
    threads: int | None
    versions: dict[str, Any]


class Tally(TypedDict, total=False):
    """What a command counts (`record_output.RowTally`)."""

    failed: Natural
    missed: Natural
    first: str


@dataclass(frozen=True)
class Mark:
    """The first `rows` input rows are done; their records are the first `bytes` bytes of the output."""

    rows: Natural
    bytes: Natural
    input: str = ""  # digest of these rows, each chained to those before it; hex
    output: str = ""  # digest of these bytes; hex
    tally: Annotated[dict[str, Any], Tally] = field(default_factory=dict)  # what the command counts
    done: bool = False  # whether there are no more rows
    digests: str = ""  # of each of the rows since the mark before, `DIGEST` hex digits; to name one that has changed


class Journal:
    """The journal of one output, locked. `header` is None if none was written yet.

    Raises UsageError for an unusable journal, and OutputError for errors of the system.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + JOURNAL)
        self.name = printable(str(self.path))
        self.header: dict[str, Any] | None = None
        self.marks: list[Mark] = []  # those in the file
        self._closed = False
        self._descriptor, self._made = self._open()
        lock(self._descriptor, output)
        whole = 0  # bytes of whole lines; the rest is half a line
        try:
            with open(self._descriptor, "rb", closefd=False) as file:
                for number, line in enumerate(reader.lines(file), 1):
                    if line.endswith(b"\n"):  # else it is half a line, the last one
                        self._take(line, number)
                        whole += len(line)
        except BaseException as error:
            os.close(self._descriptor)
            if isinstance(error, Unreadable):
                raise UsageError(f"{self.name} cannot be read: {error}", hint=_ANEW) from None
            raise
        raw = unbuffered(self._descriptor)
        self._sink = Sink(raw, self.name, owned=self._descriptor, path=self.path, whole=whole)

    def _open(self) -> tuple[int, bool]:
        """The descriptor, and whether the file was made."""
        try:
            with contextlib.suppress(FileExistsError):
                return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOEXEC, 0o600), True
            descriptor = open_regular(self.path)
            if not hasattr(os, "geteuid") or os.fstat(descriptor).st_uid == os.geteuid():
                return descriptor, False
            os.close(descriptor)
            raise NotOurs("belongs to another user")
        except NotOurs as error:
            raise UsageError(f"{self.name} {error}, so it is no journal to go by") from None
        except (OSError, ValueError) as error:
            raise unwritable(error, self.path) from None

    def _take(self, line: bytes, number: int) -> None:
        try:
            data = reader.loads(line)
            if number == 1:
                if not isinstance(data, dict) or data.pop("journal", None) != KIND:
                    raise ValueError(f"its first line does not say {KIND}")
                self.header = value_of(JournalHeader, data)
                return
            mark: Mark = value_of(Mark, data)
            if self.marks and (mark.rows < self.marks[-1].rows or mark.bytes < self.marks[-1].bytes):
                raise ValueError("it has fewer rows or bytes than the line before")
            self.marks.append(mark)
        except ValueError as error:
            what = "is no journal of this version" if number == 1 else f"is damaged at line {number}"
            raise UsageError(f"{self.name} {what}, so nothing can be resumed by it: {error}", hint=_ANEW) from None

    def start(self, header: Mapping[str, Any]) -> None:
        """Cut off a half-written line, and write the header where there is none yet; marks follow."""
        self._sink.cut_back()
        if self.header is None:
            self._sink.write(json.dumps({"journal": KIND, **header}).encode() + b"\n")
            self._sink.sync()
            sync_folder(self.path)
            self.header = dict(header)

    def add(self, mark: Mark) -> None:
        """Write a mark. The output must be on the disk already."""
        self._sink.write(json.dumps(asdict(mark)).encode() + b"\n")

    def sync(self) -> None:
        """Flush the marks to the disk."""
        self._sink.sync()

    def close(self) -> None:
        """Close the file. A journal that was created and never begun is removed."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            mine = os.fstat(self._descriptor)
            if self._made and mine.st_size == 0 and os.path.samestat(mine, self.path.lstat()):
                self.path.unlink()
        self._sink.leave()

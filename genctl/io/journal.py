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
_ANEW = "give another --output; or remove the journal and its output to start anew"


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
        self._sink: Sink | None = None
        self._whole = 0  # bytes of whole lines; the rest is half a line
        self._descriptor, self._made = self._open()
        lock(self._descriptor, output)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _open(self) -> tuple[int, bool]:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOEXEC, 0o600), True
        except FileExistsError:
            pass
        except (OSError, ValueError) as error:
            raise unwritable(error, self.path) from None
        try:
            descriptor = open_regular(self.path)
            if not hasattr(os, "geteuid") or os.fstat(descriptor).st_uid == os.geteuid():
                return descriptor, False
            os.close(descriptor)
            raise NotOurs("belongs to another user")
        except NotOurs as error:
            raise UsageError(f"{self.name} {error}, so it is no journal to go by") from None
        except OSError as error:
            raise unwritable(error, self.path) from None

    def _read(self) -> None:
        with open(self._descriptor, "rb", closefd=False) as file:
            try:
                for number, line in enumerate(reader.lines(file), 1):
                    if line.endswith(b"\n"):  # else it is half a line, the last one
                        self._take(line, number)
                        self._whole += len(line)
            except Unreadable as error:
                raise UsageError(f"{self.name} cannot be read: {error}", hint=_ANEW) from None

    def _take(self, line: bytes, number: int) -> None:
        try:
            data = reader.loads(line)
            if number > 1:
                self.marks.append(_mark(data, self.marks[-1] if self.marks else Mark(0, 0)))
                return
            if not isinstance(data, dict) or data.pop("journal", None) != KIND:
                raise ValueError(f"its first line does not say {KIND}")
            self.header = value_of(JournalHeader, data)
        except ValueError as error:
            what = "is no journal of this version" if number == 1 else f"is damaged at line {number}"
            raise UsageError(f"{self.name} {what}, so nothing can be resumed by it: {error}", hint=_ANEW) from None

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write the header and flush it to the disk. Only if there is none yet."""
        if self.header is not None:
            raise RuntimeError("the journal has a header")
        self._whole = 0
        self.resume()
        assert self._sink is not None
        self._sink.write(_line({"journal": KIND, **header}))
        self._sink.sync()
        sync_folder(self.path)
        self.header = dict(header)

    def resume(self) -> None:
        """Cut off a half-written line; marks follow."""
        self._sink = Sink(
            unbuffered(self._descriptor), self.name, owned=self._descriptor, path=self.path, whole=self._whole
        )
        self._sink.cut_back()

    def add(self, mark: Mark) -> None:
        """Write a mark. The output must be on the disk already."""
        assert self._sink is not None
        self._sink.write(_line(asdict(mark)))

    def sync(self) -> None:
        """Flush the marks to the disk."""
        assert self._sink is not None
        self._sink.sync()

    def close(self) -> None:
        """Close the file. A journal that was created and never begun is removed."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            mine = os.fstat(self._descriptor)
            if self._made and mine.st_size == 0 and os.path.samestat(mine, self.path.lstat()):
                self.path.unlink()
        with contextlib.suppress(OSError):
            if self._sink is not None:
                self._sink.leave()
            else:
                os.close(self._descriptor)
        self._descriptor = -1


def _line(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data).encode() + b"\n"


def _mark(data: Any, before: Mark) -> Mark:
    """The mark on a line. Raises ValueError if it cannot follow `before`."""
    mark: Mark = value_of(Mark, data)
    if mark.rows < before.rows or mark.bytes < before.bytes:
        raise ValueError("it has fewer rows or bytes than the line before")
    return mark

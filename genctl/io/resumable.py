"""An output that can be resumed after any interruption, and its journal.

`OUTPUT.journal` holds JSON lines. The first is the header: the job's settings, for a later run to compare with its
own. Every further line is a mark: the output's first `bytes` bytes are the complete records of the first
`rows` input rows. A mark is written about once a second, and at every multiple of `span` rows, but never before the
bytes that it covers are on the disk (fsync). After a kill, a full disk or a power cut the output is cut back to the
newest mark; anything after it, a second's work or a half-written line, is generated again.

The journal is readable by its owner only, is never a link, and is locked during a run. It holds digests and settings,
but no prompts and no texts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

from genctl.config import reader
from genctl.config.reader import Unreadable
from genctl.config.shapes import Natural, value_of
from genctl.errors import GenctlError, InputError, UsageError, change, changed, checkpoint_change, printable
from genctl.io import writers
from genctl.io.output import reopen, unbuffered, unwritable
from genctl.io.record_output import Record, RecordOutput, RowTally
from genctl.io.rows import BadRow, InputRow
from genctl.io.sink import JOURNAL, NotOurs, Sink, lock, open_regular, sync_folder, unwritten

KIND = "genctl-journal/2"
DIGEST = 16  # hex digits of a row's digest
EVERY_S = 1.0  # between two marks: the most work that a kill can lose
_ANEW = "give another --output; or remove the journal and its output to start over"


class JournalHeader(TypedDict, total=False):
    """The fields of the header that are used here. All others are only compared with the next run's."""

    seed: int | None
    batch: dict[str, Any]
    threads: int | None


class Tally(TypedDict, total=False):
    """A command's counts (`RowTally`)."""

    failed: Natural
    missed: Natural
    first: str


@dataclass(frozen=True)
class Mark:
    """The first `rows` input rows are done; their records are the first `bytes` bytes of the output."""

    rows: Natural
    bytes: Natural
    output: str = ""  # digest of these bytes; hex
    tally: Annotated[dict[str, Any], Tally] = field(default_factory=dict)  # the command's counts
    done: bool = False  # whether there are no more rows
    digests: str = ""  # of each row since the previous mark, `DIGEST` hex digits


class Journal:
    """The journal of one output, locked. `header` is None if none was written yet.

    Raises UsageError for an unusable journal, and OutputError for errors of the system.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + JOURNAL)
        self.name = printable(str(self.path))
        self.header: dict[str, Any] | None = None
        self.marks: list[Mark] = []  # those in the file
        try:
            descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except NotOurs as error:
            raise UsageError(f"{self.name} {error}, so it is no journal to go by") from None
        except (OSError, ValueError) as error:
            raise unwritable(error, self.path) from None
        lock(descriptor, output)
        whole = 0  # bytes of complete lines; the rest is an incomplete line
        try:
            with open(descriptor, "rb", closefd=False) as file:
                for number, line in enumerate(reader.lines(file), 1):
                    if line.endswith(b"\n"):  # else the last line is incomplete
                        self._take(line, number)
                        whole += len(line)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, Unreadable):
                raise UsageError(f"{self.name} cannot be read: {error}", hint=_ANEW) from None
            raise
        self._sink = Sink(unbuffered(descriptor), self.name, owned=descriptor, path=self.path, whole=whole)

    def _take(self, line: bytes, number: int) -> None:
        try:
            data = reader.loads(line)
            if number == 1:
                if not isinstance(data, dict) or data.pop("journal", None) != KIND:
                    raise ValueError(f"its first line does not say {KIND}")
                self.header = value_of(JournalHeader, data)
                return
            mark: Mark = value_of(Mark, data)
            rows, size = (self.marks[-1].rows, self.marks[-1].bytes) if self.marks else (0, 0)
            if mark.bytes < size or len(mark.digests) != DIGEST * (mark.rows - rows):
                raise ValueError("its rows or bytes do not fit the line before")
            self.marks.append(mark)
        except ValueError as error:
            what = "is no journal of this version" if number == 1 else f"is damaged at line {number}"
            raise UsageError(f"{self.name} {what}, so nothing can be resumed by it: {error}", hint=_ANEW) from None

    def start(self, header: Mapping[str, Any]) -> None:
        """Cut off an incomplete line, and write the header if there is none yet; marks follow."""
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
        """Close the file. A journal that was never begun is removed."""
        with contextlib.suppress(OSError):
            if self.header is None and self._sink.size == 0:
                self.path.unlink()
        self._sink.leave()


class ResumedOutput(RecordOutput):
    """Writes records to a file with a journal beside it. Rows finished by an earlier run are not written again.

    Rows before `done` may be decoded again (from `again` on), because the last digits of later rows in their batch
    depend on them. Their existing records stay.

    Constructing it changes nothing, except that an empty journal may be created. Raises UsageError for a job that
    cannot be resumed, InputError if the input has changed, and OutputError for errors of the system.
    """

    def __init__(
        self, path: str | Path, format: writers.Format, tally: RowTally, on_error: Callable[[Record], None]
    ) -> None:
        self._format, self._tally, self._on_error = format, tally, on_error
        self.path, self.name = Path(path), printable(str(path))
        # unlike Path.is_dir, False on errors of the system: the journal then raises the error with its reason
        if os.path.isdir(self.path):  # noqa: PTH112
            raise unwritten("it is a folder", self.name)
        self.journal = Journal(self.path)
        self._digest = hashlib.blake2b(digest_size=16)  # of the output so far
        self._size = 0
        self._sink: Sink | None = None
        self._span = 1
        self._started = False
        self._marked = float("-inf")  # time of the last mark
        self._read: dict[int, str] = {}  # digests of rows that are not written yet, by index
        try:
            self._verify()
        except BaseException:
            self._release()
            raise
        marks, header = self.journal.marks, self.journal.header or {}
        first = Mark(0, 0, self._digest.hexdigest())
        self._known = "".join(mark.digests for mark in marks)
        self._newest = self._state = replace(marks[-1] if marks else first, digests="")  # at the last mark, and now
        self.done = self.again = self._state.rows
        self.finished = self._state.done
        tally.restore(self.done, self._state.tally)
        if isinstance(number := header.get("threads"), int) and 0 < number <= 1024:
            self.threads = number
        self.in_groups = "width" in (header.get("batch") or {})

    def _verify(self) -> None:
        """Check that the output of earlier runs, if there is one, matches the journal's size and digest."""
        there, marks = os.path.lexists(self.path), self.journal.marks
        if not marks:
            if there and (self.journal.header is None or self.path.is_symlink() or self.path.stat().st_size):
                raise UsageError(
                    f"{self.name} exists and was not written with --resume, so it cannot be resumed",
                    hint="give another --output, or --force instead of --resume to replace it",
                )
            return
        mark = marks[-1]
        if not there and mark.bytes:
            raise UsageError(
                f"{self.name} is gone, but its journal {self.journal.name} is there",
                hint="remove the journal to start over",
            )
        if not there:
            return
        self._sink = sink = reopen(self.path, mark.bytes)
        for piece in sink.read(0, mark.bytes):
            self._digest.update(piece)
            self._size += len(piece)
        # bytes after the last mark of a finished job are not ours
        differs = (self._size, self._digest.hexdigest()) != (mark.bytes, mark.output)
        if differs or (mark.done and sink.size > mark.bytes):
            raise UsageError(
                f"{self.name} was changed since it was written: it differs from the {mark.bytes:,} bytes recorded in "
                f"{self.journal.name}",
                hint="remove both to start over, or give another --output",
            )

    def begin(self, job: Mapping[str, Any], span: int, origins: Mapping[str, str], *, seed_given: bool) -> int:
        before = self.journal.header
        if before is not None:
            if not seed_given and isinstance(before.get("seed"), int):
                job = {**job, "seed": before["seed"]}
            check_same(self.name, before, job, origins)
        if not self.finished:
            self._span = span
            self.journal.start(job)
            if self._sink is None:
                self._sink = reopen(self.path, None)
                sync_folder(self.path)
            self._sink.cut_back()
            if not self.journal.marks:
                self.journal.add(self._state)
                self.journal.sync()
            self._started = True
            self.again = self.done - self.done % span
            sink = writers.Unclosed(self._write)
            writer = writers.open_writer(self._format, sink, on_error=self._on_error, begun=self._size > 0)
            self._ordered = writers.Ordered(writer, start=self.done, written=self._written)
        return int(job["seed"])

    def consume(self, row: InputRow | BadRow) -> None:
        """Record the next input row. Raises InputError if it differs from the row that an earlier run read."""
        if isinstance(row, BadRow):
            essence: list[Any] = [row.id, row.code, row.message]
        else:
            essence = [row.id, row.prompt, row.prompt_ids, row.messages, row.params, row.extra]
        content = json.dumps([*essence, row.columns] if row.columns else essence).encode()
        digest = hashlib.blake2b(content, digest_size=DIGEST // 2).hexdigest()
        if row.index >= self.done:
            self._read[row.index] = digest
        elif self._known[DIGEST * row.index : DIGEST * (row.index + 1)] != digest:
            raise InputError(
                f"{self.name} cannot be resumed: the input has changed: row {row.index + 1:,} is not what was read",
                hint="rows that are done must stay as they were; give another --output for another input",
            )

    def end_of_input(self, rows: int) -> None:
        """Record the number of rows. Raises InputError if more rows were done, or if a finished job had fewer."""
        if rows < self.done or (self.finished and rows > self.done):
            least = "" if self.finished else "at least "
            raise InputError(
                f"{self.name} cannot be resumed: the input has changed: it had {least}{self.done:,} rows, now {rows:,}"
            )

    def put(self, index: int, records: Sequence[Record]) -> None:
        if index >= self.done:
            self._ordered.put(index, records)

    def stop(self, index: int, records: Sequence[Record]) -> None:
        """Do not write the row: the next run decodes it again."""

    def _write(self, data: bytes) -> None:
        assert self._sink is not None
        self._sink.write(data)
        self._digest.update(data)
        self._size += len(data)

    def _written(self, index: int, records: Sequence[Record]) -> None:
        """Update the state after a row's records are written. Writes a mark if one is due."""
        self._tally.written(index, records)
        digests = self._state.digests + self._read.pop(index)
        self._state = Mark(index + 1, self._size, self._digest.hexdigest(), self._tally.counts(), digests=digests)
        if (index + 1) % self._span == 0 or time.monotonic() - self._marked >= EVERY_S:
            self._mark()

    def _mark(self) -> None:
        assert self._sink is not None
        self._sink.sync()
        if self._state != self._newest:
            self.journal.add(self._state)
        self._newest = self._state = replace(self._state, digests="")
        self._marked = time.monotonic()

    def close(self, *, cut_short: bool) -> None:
        """Write the last mark and close. Raises OutputError after closing."""
        try:
            # rows that finished early or during shutdown are not written: the next run decodes them in order
            if self._started and not cut_short:
                self._ordered.close()
            if self._started and not self.hurried:  # else the newest mark is at most a second old
                self._state = replace(self._state, done=not cut_short)
                self._mark()
                self.journal.sync()
        finally:
            self._release()

    def abandon(self) -> None:
        """After an error, save as much as possible."""
        with contextlib.suppress(GenctlError, OSError):
            self.close(cut_short=True)

    def _release(self) -> None:
        """Close the files as they are."""
        if self._sink is not None:
            self._sink.leave()
        self.journal.close()


# -- whether a resumed job still matches its journal's header, and what has changed ------------------------------------


def check_same(name: str, before: Mapping[str, Any], now: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raises UsageError, listing all changes, if two headers of a journal differ."""
    changes = differences(before, now, origins)
    if changes:
        raise UsageError(
            f"{name} cannot be resumed: " + "; ".join(changes),
            hint="use the same options as before, or another --output; --force instead of --resume starts over",
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """The differences between two headers, in words. The input is compared by row (see `ResumedOutput.consume`)."""
    changes = []
    for part in ("versions", "settings", "seed", "format", "records", "checkpoints", "files"):
        old, new = (value if isinstance(value := header.get(part), dict) else {part: value} for header in (before, now))
        for key, was, is_now in changed(old, new):
            if part == "files":
                changes.append(f"the file that {key} names has changed")
            elif part != "checkpoints":
                place = origins.get(key, "default") if part == "settings" else "default"
                name = _FLAGS.get(key, key) if part in ("format", "records") else key
                changes.append(change(name, was, is_now, "" if place == "default" else place))
            elif None not in (was, is_now):  # None: the name changed, which is already listed as a setting
                changes.append(checkpoint_change(key, was, is_now))
    if not changes and before.get("batch") != now["batch"]:
        changes.append(change("rows decoded together", _together(before.get("batch")), _together(now["batch"])))
    return changes


def _together(batch: Any) -> str:
    """The number of rows in a pass, in words."""
    batch = batch if isinstance(batch, dict) else {}
    if "numbers" in batch:
        return f"in any number ({batch['numbers']})"
    return str(batch["width"]) if "width" in batch else "unset"


_FLAGS = {
    "format": "--format",
    "echo": "--echo",
    "template": "--template",
    "tokens": "--scores",
    "top": "--top-logprobs",
    "explain": "--explain",
    "watch": "--watch",
    "fail_on": "--fail-on",
}

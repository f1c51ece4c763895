"""An output that can be resumed after any interruption, from the last row that is known to be complete.

While rows are written, a mark goes to the journal about once a second, and at every multiple of `span` rows, but never
before the bytes that it covers are on the disk (fsync). After a kill, a full disk or a power cut the output is cut back
to the newest mark; what followed it, a second's work or a half-written line, is generated again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from genctl.errors import GenctlError, InputError, UsageError, count, printable
from genctl.io.journal import DIGEST, Journal, Mark
from genctl.io.output import Sink, reopen, sync_folder
from genctl.io.rows import BadRow, InputRow
from genctl.io.sink import unwritten

EVERY_S = 1.0  # between two marks: the most work that a kill can lose
_SIZE = 16  # bytes of a digest


class Resumable:
    """An output file and its journal. After `start` it is a sink for records.

    Constructing it changes nothing, except that an empty journal may be created. Raises UsageError for what cannot be
    resumed, InputError if the input has changed, and OutputError for errors of the system.
    """

    def __init__(self, output: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(output)
        self.name = printable(str(output))
        # false where the system refuses an answer, as Path.is_dir is not: the journal's error has its reason
        if os.path.isdir(self.path):  # noqa: PTH112
            raise unwritten("it is a folder", self.name)
        self.journal = Journal(self.path)
        self.span = 1
        self._clock = clock
        self._marked = float("-inf")
        self._chain = b""
        # rows -> the chain up to there and the last row's digest, for rows that are not written yet
        self._chains: dict[int, tuple[bytes, str]] = {}
        self._digests: list[str] = []  # of the rows that were written since the newest mark
        self._checked = 0  # marks whose rows have been read again
        self._digest = hashlib.blake2b(digest_size=_SIZE)
        self._size = 0
        self._sink: Sink | None = None
        self._started = False
        try:
            self._sink = self._verified()
        except BaseException:
            self.release()
            raise
        self._state = self._newest = replace(self.mark, digests="")  # whole rows, and what was marked last
        self._known = "".join(mark.digests for mark in self.journal.marks)

    @property
    def header(self) -> dict[str, Any] | None:
        """The settings of the job when it began; None if there is no journal yet."""
        return self.journal.header

    @property
    def mark(self) -> Mark:
        """The progress of earlier runs."""
        return self.journal.marks[-1] if self.journal.marks else Mark(0, 0, "", self._digest.hexdigest())

    def _verified(self) -> Sink | None:
        """The output of earlier runs, if there is one, with the bytes that the journal vouches for."""
        there = os.path.lexists(self.path)
        if self.header is None or not self.journal.marks:
            if there and (self.header is None or self.path.is_symlink() or self.path.stat().st_size):
                raise UsageError(
                    f"{self.name} exists and was not written with --resume, so it cannot be resumed",
                    hint="give another --output, or --force instead of --resume to replace it",
                )
            return None
        if not there and self.mark.bytes:
            raise UsageError(
                f"{self.name} is gone, but its journal {self.journal.name} is there",
                hint="remove the journal to start over",
            )
        if not there:
            return None
        self._sink = sink = reopen(self.path, self.mark.bytes)
        for piece in sink.read(0, self.mark.bytes):
            self._digest.update(piece)
            self._size += len(piece)
        if self._size != self.mark.bytes or self._digest.hexdigest() != self.mark.output:
            raise UsageError(
                f"{self.name} was changed since it was written: its first {self.mark.bytes:,} bytes differ from those "
                f"recorded in {self.journal.name}",
                hint="remove both to start over, or give another --output",
            )
        more = sink.size - self._size
        if self.mark.done and more:  # after the last mark of a finished job nothing is ours
            raise UsageError(
                f"{self.name} was changed since it was finished: {count(more, 'byte follows', 'bytes follow')} the "
                f"{self._size:,} recorded in {self.journal.name}",
                hint=f"truncate -s {self._size} {shlex.quote(str(self.path))} removes them",
            )
        return sink

    def start(self, header: Mapping[str, Any], span: int) -> None:
        """Begin or continue: the journal has its header, and the output ends with the last whole row."""
        self.span = span
        self.journal.start(header)
        if self._sink is None:
            self._sink = reopen(self.path, None)
            sync_folder(self.path)
        self._sink.cut_back()
        if not self.journal.marks:
            self.journal.add(self.mark)
            self.journal.sync()
        self._started = True

    # -- the input -----------------------------------------------------------------------------------------------------

    def consume(self, row: InputRow | BadRow) -> None:
        """Note the next input row. Raises InputError if it is not the row that was read before."""
        if isinstance(row, BadRow):
            essence: list[Any] = [row.id, row.code, row.message]
        else:
            essence = [row.id, row.prompt, row.prompt_ids, row.messages, row.params, row.extra]
        content = json.dumps([*essence, row.columns] if row.columns else essence).encode()
        digest = hashlib.blake2b(content, digest_size=DIGEST // 2).hexdigest()
        self._chain = hashlib.blake2b(self._chain + content, digest_size=_SIZE).digest()
        rows, marks = row.index + 1, self.journal.marks
        if rows > self.mark.rows:
            self._chains[rows] = self._chain, digest
        elif self._known[DIGEST * row.index : DIGEST * rows] not in ("", digest):
            raise InputError(
                f"{self.name} cannot be resumed: the input has changed: row {rows:,} is not what was read",
                hint="rows that are done must stay as they were; give another --output for another input",
            )
        while self._checked < len(marks) and marks[self._checked].rows <= rows:
            mark = marks[self._checked]
            if mark.rows == rows and mark.input != self._chain.hex():
                first = marks[self._checked - 1].rows + 1 if self._checked else 1
                which = f"row {rows:,} is" if first >= rows else f"rows {first:,} to {rows:,} are"
                raise InputError(f"{self.name} cannot be resumed: the input has changed: {which} not what was read")
            self._checked += 1

    def end_of_input(self, rows: int) -> None:
        """Note the number of rows. Raises InputError if more were done, or if a finished job had fewer."""
        mark = self.mark
        if rows < mark.rows or (mark.done and rows > mark.rows):
            least = "" if mark.done else "at least "
            raise InputError(
                f"{self.name} cannot be resumed: the input has changed: it had {least}{mark.rows:,} rows, now {rows:,}"
            )

    # -- the output ----------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Write one record. Raises OutputError."""
        assert self._sink is not None
        self._sink.write(data)
        self._digest.update(data)
        self._size += len(data)

    def written(self, rows: int, tally: Mapping[str, Any]) -> None:
        """The records of the first `rows` rows are written, with these counts. Writes a mark if it is time."""
        chain, digest = self._chains.pop(rows)
        self._digests.append(digest)
        self._state = Mark(rows, self._size, chain.hex(), self._digest.hexdigest(), dict(tally))
        if rows % self.span == 0 or self._clock() - self._marked >= EVERY_S:
            self._mark()

    def _mark(self, *, done: bool = False) -> None:
        assert self._sink is not None
        new = replace(self._state, done=done)
        self._sink.sync()
        if new != self._newest:
            self.journal.add(replace(new, digests="".join(self._digests)))
            self._digests.clear()
        self._newest, self._marked = new, self._clock()

    def close(self, *, done: bool = False) -> None:
        """Write the last mark and close; `done`: there are no more rows. Raises OutputError after closing."""
        try:
            if self._started:
                self._mark(done=done)
                self.journal.sync()
        finally:
            self.release()

    def abandon(self) -> None:
        """Save what can be saved while an error is reported."""
        with contextlib.suppress(GenctlError, OSError):
            self.close()

    def release(self) -> None:
        """Close the files as they are."""
        if self._sink is not None:
            self._sink.leave()
        self.journal.close()

"""Where the records of rows go: to a new output, or to one that an earlier run began."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from genctl.errors import CheckError, Exit
from genctl.events.results import Result
from genctl.identity import check_same
from genctl.io import writers
from genctl.io.rows import BadRow, InputRow

Record = writers.Record


@dataclass
class RowTally:
    """A row counts when its records are written, so that a resumed job counts each row once."""

    rows: int = 0
    failed: int = 0
    missed: int = 0  # sequences that --fail-on found
    first: str = ""  # the sentence for the first of them
    _waiting: dict[int, list[str]] = field(default_factory=dict)  # sentences of --fail-on, by row, until it is written

    def look(self, index: int, prompt: str, result: Result, wanted: Sequence[str], *, texts: bool = True) -> None:
        """Note each sequence that --fail-on looks for, until the row is written. `prompt` says which it is, if needed.

        Without a tokenizer there are no `texts`, and a sequence without tokens is empty.
        """
        for number, sequence in enumerate(result.sequences, 1):
            what = f"sequence {number}" if len(result.sequences) > 1 else "the text"
            empty = not (sequence.text.strip() if texts else sequence.token_ids)
            ends = {sequence.finish_reason: f"ended by {sequence.finish_reason}"}
            ends |= {"length": ends["context"]} if "context" in ends else {}
            ends |= {"empty": "is empty"} if empty else {}
            ends |= {"unmet": sequence.lack} if sequence.unmet else {}
            words = next((words for end, words in ends.items() if end in wanted), "")
            if words:
                self._waiting.setdefault(index, []).append(f"{prompt}{what} {words}")

    def written(self, index: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Count a row whose records are written."""
        self.rows += 1
        self.failed += any("error" in record for record in records)
        for sentence in self._waiting.pop(index, ()):
            self.missed += 1
            self.first = self.first or sentence

    def counts(self) -> dict[str, Any]:
        """The counts for the journal, for the run that continues."""
        missed = {"missed": self.missed, "first": self.first} if self.missed else {}
        return {"failed": self.failed, **missed}

    def restore(self, rows: int, counts: Mapping[str, Any]) -> None:
        """Take over the counts of an earlier run."""
        self.rows = rows
        self.failed, self.missed = int(counts.get("failed", 0)), int(counts.get("missed", 0))
        self.first = str(counts.get("first", ""))

    def status(self) -> int:
        """The exit status. Raises CheckError if --fail-on found something."""
        if self.missed:
            more = f" (and {self.missed - 1} more)" if self.missed > 1 else ""
            raise CheckError(f"--fail-on: {self.first}{more}")
        return int(Exit.ROWS_FAILED if self.failed else Exit.DONE)


class RecordOutput:
    """Records to a writer, in the order of their rows. `tally` counts them."""

    done = 0  # rows whose records are out since an earlier run
    again = 0  # the first row to decode: rows before `done` are decoded again where others need them beside them
    finished = False  # nothing is left to do
    compared = False  # the input is known to be, byte by byte, what it was
    hurried = False  # to be set where closing must not take its time
    threads: int | None = None  # with which an earlier run began the output
    in_groups = False  # whether it was begun in groups of rows, and has to go on in them

    def __init__(
        self,
        writer: writers.Writer,
        sink: writers.Sink | None = None,
        tally: RowTally | None = None,
        *,
        unordered: bool = False,
    ) -> None:
        self._sink, self._tally = sink, tally or RowTally()
        self._ordered = writers.Ordered(writer, unordered=unordered, written=self._tally.written)

    def begin(self, job: Mapping[str, Any], span: int, origins: Mapping[str, str], *, seed_given: bool) -> int:
        """Begin or continue, now that the checkpoint is loaded. Returns the seed that holds."""
        return int(job["seed"])

    def consume(self, row: InputRow | BadRow) -> None:
        """Take note of the next row of the input."""

    def end_of_input(self, rows: int) -> None:
        """Take note that the input has so many rows."""

    def put(self, index: int, records: Sequence[Record]) -> None:
        """Write the records of a row. Rows may come in any order."""
        self._ordered.put(index, records)

    def stop(self, index: int, records: Sequence[Record]) -> None:
        """End the output with this row: those after it that finished earlier are dropped."""
        self._ordered.drop()
        self._ordered.put(index, records)

    def close(self, *, cut_short: bool) -> None:
        """Close. `cut_short`: the run was interrupted, and rows may be missing."""
        self._ordered.close(partial=cut_short)

    def abandon(self) -> None:
        """Give the output up: an error is being reported."""
        if self._sink is not None:
            self._sink.abandon()


class ResumedOutput(RecordOutput):
    """Records to a file with a journal beside it. Rows that an earlier run has finished are not written again.

    Rows before `done` may be decoded again beside those that follow (`again`), whose last digits depend on the rows
    that are computed with them. Their records stay as they were written.
    """

    def __init__(self, path: str, format: writers.Format, tally: RowTally, on_error: Callable[[Record], None]) -> None:
        from genctl.io.resumable import Resumable

        self._format, self._tally, self._on_error = format, tally, on_error
        self.file = Resumable(path)
        mark = self.file.mark
        self.done = self.again = mark.rows
        self.finished = mark.done
        tally.restore(mark.rows, mark.tally)
        header = self.file.header or {}
        if isinstance(number := header.get("threads"), int) and 0 < number <= 1024:
            self.threads = number
        self.in_groups = "width" in (header.get("batch") or {})

    def begin(self, job: Mapping[str, Any], span: int, origins: Mapping[str, str], *, seed_given: bool) -> int:
        before = self.file.header
        if before is not None:
            if not seed_given and isinstance(before.get("seed"), int):
                job = {**job, "seed": before["seed"]}
            check_same(self.file.name, before, job, origins)
            self.compared = job["input"] is not None and before.get("input") == job["input"]
        if not self.finished:
            self.file.start(job, span)
            self.again = self.done - self.done % span
            begun = self.file.mark.bytes > 0
            writer = writers.open_writer(
                self._format, writers.Unclosed(self.file.write), on_error=self._on_error, begun=begun
            )
            self._ordered = writers.Ordered(writer, start=self.done, written=self._note)
        return int(job["seed"])

    def consume(self, row: InputRow | BadRow) -> None:
        self.file.consume(row)

    def end_of_input(self, rows: int) -> None:
        self.file.end_of_input(rows)

    def put(self, index: int, records: Sequence[Record]) -> None:
        if index >= self.done:
            self._ordered.put(index, records)

    def stop(self, index: int, records: Sequence[Record]) -> None:
        """Leave the row to the next run."""

    def close(self, *, cut_short: bool) -> None:
        # rows that finished early or on the way out are left to the next run, which decodes them undisturbed
        if not cut_short and not self.finished:
            self._ordered.close()
        if self.hurried:
            self.file.release()  # the newest mark is a second old at most
        else:
            self.file.close(done=not cut_short)

    def abandon(self) -> None:
        self.file.abandon()

    def _note(self, index: int, records: Sequence[Record]) -> None:
        self._tally.written(index, records)
        self.file.written(index + 1, self._tally.counts())

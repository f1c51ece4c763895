"""Where the records of rows go, and what a command counts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from genctl.errors import CheckError, Exit
from genctl.events.results import Result
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

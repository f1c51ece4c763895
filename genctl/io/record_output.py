"""Write the records of rows, and count rows and findings."""

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
    """Counts of rows. A row is counted when its records are written, so a resumed job counts each row once."""

    rows: int = 0
    failed: int = 0
    missed: int = 0  # sequences that match --fail-on
    first: str = ""  # the message for the first of them
    _waiting: dict[int, list[str]] = field(default_factory=dict)  # messages of --fail-on, by row, until it is written

    def look(self, index: int, prompt: str, result: Result, wanted: Sequence[str], *, texts: bool = True) -> None:
        """Note each sequence that matches --fail-on, until the row is written. `prompt` names the prompt, if needed.

        Without a tokenizer (`texts` False), a sequence counts as empty if it has no tokens.
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
        """The counts for the journal, restored by a resumed run."""
        missed = {"missed": self.missed, "first": self.first} if self.missed else {}
        return {"failed": self.failed, **missed}

    def restore(self, rows: int, counts: Mapping[str, Any]) -> None:
        """Restore the counts of an earlier run."""
        self.rows = rows
        self.failed, self.missed = int(counts.get("failed", 0)), int(counts.get("missed", 0))
        self.first = str(counts.get("first", ""))

    def status(self) -> int:
        """The exit status. Raises CheckError if a sequence matched --fail-on."""
        if self.missed:
            more = f" (and {self.missed - 1} more)" if self.missed > 1 else ""
            raise CheckError(f"--fail-on: {self.first}{more}")
        return int(Exit.ROWS_FAILED if self.failed else Exit.DONE)


class RecordOutput:
    """Writes records in the order of their rows. `tally` counts them."""

    done = 0  # rows whose records an earlier run has written
    again = 0  # the first row to decode; less than `done` if earlier rows must be decoded again to complete a group
    finished = False  # nothing is left to do
    hurried = False  # set if closing must not take long
    threads: int | None = None  # number of threads of the run that began the output
    in_groups = False  # whether the output was begun in groups of rows, and must continue in groups

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
        """Begin or continue, once the checkpoint is loaded. Returns the seed to use."""
        return int(job["seed"])

    def consume(self, row: InputRow | BadRow) -> None:
        """Record the next row of the input."""

    def end_of_input(self, rows: int) -> None:
        """Record that the input has ended after this many rows."""

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
        """Give up the output after an error."""
        if self._sink is not None:
            self._sink.abandon()

"""Counts of the rows that a run writes, and the exit status that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from genctl.errors import CheckError, Exit
from genctl.results import Result


@dataclass
class RowTally:
    """A row counts when its records are written, so that a resumed job counts each row once."""

    rows: int = 0
    failed: int = 0
    missed: int = 0  # sequences that --fail-on found
    first: str = ""  # the sentence for the first of them
    on_row: Callable[[bool], object] = lambda failed: None  # called for each row: whether it failed
    _waiting: dict[int, list[str]] = field(default_factory=dict)  # sentences of --fail-on, by row, until it is written

    def look(self, index: int, prompt: str, result: Result, wanted: Sequence[str], *, texts: bool = True) -> None:
        """Note each sequence that --fail-on looks for, until the row is written. `prompt` says which it is, if needed.

        Without a tokenizer there are no `texts`, and a sequence without tokens is empty.
        """
        for number, sequence in enumerate(result.sequences, 1):
            what = f"sequence {number}" if len(result.sequences) > 1 else "the text"
            empty = not (sequence.text.strip() if texts else sequence.token_ids)
            ends = {sequence.finish_reason: f"ended by {sequence.finish_reason}"}
            ends |= {"empty": "is empty"} if empty else {}
            ends |= {"unmet": sequence.lack} if sequence.unmet else {}
            words = next((words for end, words in ends.items() if end in wanted), "")
            if words:
                self._waiting.setdefault(index, []).append(f"{prompt}{what} {words}")

    def written(self, index: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Count a row whose records are written."""
        failed = any("error" in record for record in records)
        self.rows += 1
        self.failed += int(failed)
        for sentence in self._waiting.pop(index, ()):
            self.missed += 1
            self.first = self.first or sentence
        self.on_row(failed)

    def kept(self) -> dict[str, Any]:
        """The counts for the journal, for the run that continues."""
        missed = {"missed": self.missed, "first": self.first} if self.missed else {}
        return {"failed": self.failed, **missed}

    def go_on(self, rows: int, kept: Mapping[str, Any]) -> None:
        """Take over the counts of an earlier run."""
        self.rows = rows
        self.failed, self.missed = int(kept.get("failed", 0)), int(kept.get("missed", 0))
        self.first = str(kept.get("first", ""))

    def status(self) -> int:
        """The exit status. Raises CheckError if --fail-on found something."""
        if self.missed:
            more = f" (and {self.missed - 1} more)" if self.missed > 1 else ""
            raise CheckError(f"--fail-on: {self.first}{more}")
        return int(Exit.ROWS_FAILED if self.failed else Exit.DONE)

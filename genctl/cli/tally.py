"""What a run counts in the rows that it writes, and what that makes of its exit status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from genctl.errors import CheckError, Exit


@dataclass
class RowTally:
    """Rows count once their records are out, so that a job that goes on counts each of them once."""

    rows: int = 0
    failed: int = 0
    missed: int = 0  # sequences that --fail-on looked for
    first: str = ""  # of them, in words
    _waiting: dict[int, list[str]] = field(default_factory=dict)  # by row, what --fail-on will say once it is written

    def expect(self, index: int, sentences: list[str]) -> None:
        """A row is on its way to the output, and --fail-on has this to say of it."""
        if sentences:
            self._waiting[index] = sentences

    def written(self, index: int, records: Sequence[Mapping[str, Any]]) -> bool:
        """The records of a row are out. Says whether it failed."""
        failed = any("error" in record for record in records)
        self.rows += 1
        self.failed += int(failed)
        for sentence in self._waiting.pop(index, ()):
            self.missed += 1
            self.first = self.first or sentence
        return failed

    def kept(self) -> dict[str, Any]:
        """For the journal: what the run that comes to the end must know of those before it."""
        missed = {"missed": self.missed, "first": self.first} if self.missed else {}
        return {"failed": self.failed, **missed}

    def go_on(self, rows: int, kept: Mapping[str, Any]) -> None:
        """Take over from an earlier run."""
        self.rows = rows
        self.failed, self.missed = int(kept.get("failed", 0)), int(kept.get("missed", 0))
        self.first = str(kept.get("first", ""))

    def status(self) -> int:
        """The exit status. Raises CheckError if --fail-on found something."""
        if self.missed:
            more = f" (and {self.missed - 1} more)" if self.missed > 1 else ""
            raise CheckError(f"--fail-on: {self.first}{more}")
        return int(Exit.ROWS_FAILED if self.failed else Exit.DONE)

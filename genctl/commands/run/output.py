"""The results that `genctl run` writes: their records, and the output that gets them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from genctl.commands.job import Job
from genctl.commands.run.options import RunOptions
from genctl.commands.run.screen import Screen
from genctl.engines.protocol import About
from genctl.errors import Exit
from genctl.events.results import Result
from genctl.io import writers
from genctl.io.record_output import RecordOutput, RowTally
from genctl.io.records import error_record, other_entry, result_record
from genctl.io.rows import BadRow, InputRow


class FirstFailure(NamedTuple):
    """With --strict, the first row that failed: nothing is written after its record."""

    subject: str  # the row's name in messages
    row: int  # its index
    record: dict[str, Any]


def open_records(
    options: RunOptions, tally: RowTally, on_error: Callable[[writers.Record], None], *, shown: bool
) -> RecordOutput:
    """The output of a run: standard output, a device or a file; it discards records if the view shows results."""
    if options.resume:
        from genctl.io.resumable import ResumedOutput

        assert options.output is not None
        return ResumedOutput(options.output, options.format, tally, on_error)
    if shown:
        return RecordOutput(writers.Unclosed(), None, tally, unordered=options.unordered)
    sink = writers.open_output(options.output, sys.stdout, force=options.force)
    escape: Callable[[str], str] = str
    if sink.is_terminal and not options.tree_format:
        from genctl.terminal.widgets import visible as escape
    format: writers.Format = "json" if options.tree_format == "json" else options.format
    writer = writers.open_writer(format, sink, on_error=on_error, shown=escape)
    return RecordOutput(writer, sink, tally, unordered=options.unordered)


class Results:
    """The results of a run in input order: the records of each row, with --strict up to the first failure.

    `about` is the engine's, and `reused` is whether a --prompt-cache is in use; both are set once the engine is loaded.
    """

    about: About
    reused: bool

    def __init__(self, job: Job, options: RunOptions, screen: Screen) -> None:
        self.job, self.options, self.screen = job, options, screen
        self.tally = RowTally()
        # with --strict, `status` prints the only failure
        on_error = (lambda record: None) if options.strict else job.messages.failure
        self.output = open_records(options, self.tally, on_error, shown=job.shown)
        self.stopped: FirstFailure | None = None
        self._reported_full = False  # whether a text that ended at a full context has been reported

    @property
    def cut_short(self) -> bool:
        """Whether the run ends before the end of the input."""
        return bool(self.job.interrupt.status) or self.stopped is not None

    def take(self, row: InputRow, result: Result) -> None:
        """Write a result, or its search tree in place of texts; drop rows after the failure that ends the run."""
        if self.stopped is not None and row.index > self.stopped.row:
            return
        subject = self.job.row_label(row)
        if row.index >= self.output.done:
            for note in result.shortfalls(subject):
                self.job.messages.print(f"warning: {note}")
            self._report_full(subject, result)
        self.tally.look(row.index, subject, result, self.options.fail_on, texts=self.about.has_texts)
        self.output.put(row.index, self.screen.tree_records(row.id) or self._records(row, result))
        self._count(row, failed=False)

    def fail(
        self, row: InputRow | BadRow, code: str, message: str, *, already_shown: bool = False, hint: str = ""
    ) -> None:
        """Write the record of a failed row; with --strict, only store the first in input order, which ends the run."""
        if not self.options.strict:
            self.job.fail(row, code, message, already_shown=already_shown, hint=hint)
            self._count(row, failed=True)
        elif self.stopped is None or row.index < self.stopped.row:
            record = error_record(row.id, code, message, row.columns)
            self.stopped = FirstFailure(self.job.row_label(row), row.index, record)

    def _count(self, row: InputRow | BadRow, *, failed: bool) -> None:
        if row.index >= self.output.done:
            self.screen.row_done(failed=failed)

    def end(self, rows: int) -> None:
        """Finish the output after the last row; `rows` is the number of rows that were read."""
        if self.stopped is not None:
            self.output.stop(self.stopped.row, [self.stopped.record])
        else:
            self.output.end_of_input(rows)

    def status(self) -> int:
        """The exit status of a run that was not interrupted. Raises CheckError if a requested check failed."""
        if self.stopped is not None:
            subject, index, record = self.stopped
            before = f"the {index:,} rows before it are written"
            before = {0: "no row is before it", 1: "the row before it is written"}.get(index, before)
            self.job.messages.print(f"error: {subject}{record['error']['message']}; --strict stops here, {before}")
            return int(Exit.ROWS_FAILED)
        return self.tally.status()

    def _report_full(self, subject: str, result: Result) -> None:
        """Note once that a text ended because the context was full, unless a live view shows how texts end."""
        full = next((one.hypothesis.cause for one in result.sequences if one.finish_reason == "context"), None)
        if full is not None and not self._reported_full and not self.job.live:
            self._reported_full = True
            self.job.messages.note(
                f"{subject}the text ends at the {full}, before max_new_tokens (finish_reason: context)"
            )

    def _records(self, row: InputRow, result: Result) -> list[dict[str, Any]]:
        """One record for each sequence of a row."""
        options, records = self.options, []
        for number, sequence in enumerate(result.sequences):
            hypothesis = sequence.hypothesis
            if options.format in writers.TEXTS and not self.about.has_texts:  # ids, as on a terminal
                hypothesis = dataclasses.replace(hypothesis, text="".join(f"<{id}>" for id in hypothesis.tokens))
            if options.echo:
                between = "\t" if self.about.is_encoder_decoder else ""
                hypothesis = dataclasses.replace(hypothesis, text=f"{result.prompt}{between}{hypothesis.text}")
            extra: dict[str, Any] = {}
            if result.drafted and options.timing:
                extra = {"drafted": result.drafted, "accepted": result.accepted}
            if "beam" in result.strategy:
                extra["parents"] = list(sequence.parents)
            if result.others and number == 0 and options.with_tokens:
                extra["others"] = [other_entry(other.hypothesis) for other in result.others]
            records.append(
                result_record(
                    row,
                    result,
                    number,
                    hypothesis=hypothesis,
                    tokens=options.with_tokens or any(token.processed is not None for token in sequence.tokens),
                    load_s=self.job.load_s if options.timing else None,
                    extra=extra,
                    reused_tokens=result.reused if self.reused else None,
                )
            )
        return records

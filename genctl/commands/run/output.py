"""What `genctl run` writes: records of results, and to which output."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from genctl.commands.run.options import RunOptions
from genctl.io import writers
from genctl.io.record_output import RecordOutput, ResumedOutput, RowTally
from genctl.io.records import other_entry, result_record
from genctl.io.rows import InputRow
from genctl.results import Result

if TYPE_CHECKING:
    pass


def open_records(
    options: RunOptions, tally: RowTally, on_error: Callable[[writers.Record], None], *, shown: bool
) -> RecordOutput:
    """The output of a run: standard output, a device or a file; nothing where the view has `shown` it."""
    if options.resume:
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


@dataclass
class FirstFailure:
    """With --strict, the first row that failed: nothing is written after its record."""

    subject: str  # what messages call the row
    index: int
    record: dict[str, Any]

    def sentence(self) -> str:
        """The error that ends the run."""
        before = {0: "no row is before it", 1: "the row before it is written"}.get(
            self.index, f"the {self.index:,} rows before it are written"
        )
        return f"error: {self.subject}{self.record['error']['message']}; --strict stops here, {before}"


def records_of(
    options: RunOptions,
    row: InputRow,
    result: Result,
    *,
    load_s: float,
    encoder_decoder: bool,
    saved: bool = False,
    texts: bool = True,
) -> list[dict[str, Any]]:
    """One record for each sequence of a row. `saved`: --prompt-cache. `texts`: there is a tokenizer to write any."""
    records = []
    for number, sequence in enumerate(result.sequences):
        hypothesis = sequence.hypothesis
        if options.format in writers.TEXTS and not texts:  # the same as on a terminal
            hypothesis = dataclasses.replace(hypothesis, text="".join(f"<{id}>" for id in hypothesis.tokens))
        if options.echo:
            between = "\t" if encoder_decoder else ""
            hypothesis = dataclasses.replace(hypothesis, text=f"{result.prompt}{between}{hypothesis.text}")
        extra: dict[str, Any] = {}
        if result.drafted:
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
                load_s=load_s if options.timing else None,
                extra=extra,
                reused_tokens=result.reused if saved else None,
            )
        )
    return records

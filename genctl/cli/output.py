"""Records of results, and where they go: nowhere (the view shows them), to a sink, or to an output that resumes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from genctl.batch import writers
from genctl.batch.records import record
from genctl.batch.resumable import Resumable
from genctl.batch.rows import BadRow, InputRow
from genctl.cli.resume import Echo, OutputIdentity, Unclosed, check_same
from genctl.cli.run_options import RunOptions
from genctl.cli.shortfall import listed
from genctl.results import Result

Record = writers.Record
Written = Callable[[int, Sequence[Record]], object]


def nowhere() -> Unclosed:
    """The writer of a live run: the view has shown what it would write."""
    return Unclosed(lambda record: None)


class RecordOutput:
    """Records to standard output, a device or a new file, or to nothing where they are `shown` already."""

    done = 0  # rows whose records are out since an earlier run
    again = 0  # the first row to decode: rows before `done` are decoded again where others need them beside them
    finished = False  # nothing is left to do
    compared = False  # the input is known to be, byte by byte, what it was
    hurried = False  # to be set where closing must not take its time
    tally: Mapping[str, Any] = {}  # what earlier runs have counted in the rows that are done

    def __init__(
        self, options: RunOptions, written: Written, on_error: Callable[[Record], None], *, shown: bool
    ) -> None:
        self._sink: writers.Sink | None = None
        writer: writers.Writer = nowhere()
        if not shown:
            self._sink = writers.open_output(options.output, sys.stdout, force=options.force)
            format: writers.Format = "json" if options.tree_format == "json" else options.format
            escape = _visible if self._sink.is_terminal and not (options.raw or options.tree_format) else str
            writer = writers.open_writer(format, self._sink, on_error=on_error, shown=escape)
        self._ordered: writers.Ordered | None = writers.Ordered(writer, unordered=options.unordered, written=written)

    @property
    def differs(self) -> bool:
        """Whether rows that were decoded again came out differently."""
        return False

    def begin(self, identity: OutputIdentity, span: int) -> OutputIdentity:
        """Begin or continue, now that the checkpoint is loaded. Returns `identity` with the seed that holds."""
        return identity

    def consume(self, row: InputRow | BadRow) -> None:
        """Take note of the next row of the input."""

    def end_of_input(self, rows: int) -> None:
        """Take note that the input has so many rows."""

    def put(self, index: int, records: Sequence[Record]) -> None:
        """Write the records of a row. Rows may come in any order."""
        assert self._ordered is not None
        self._ordered.put(index, records)

    def stop(self, index: int, records: Sequence[Record]) -> None:
        """End the output with this row, whatever came after it."""
        self.put(index, records)
        assert self._ordered is not None
        self._ordered.drop()

    def close(self, *, cut_short: bool) -> None:
        """Close. `cut_short`: the run was interrupted, and rows may be missing."""
        if self._ordered is not None:
            self._ordered.close(partial=cut_short)

    def abandon(self) -> None:
        """Give the output up: an error is being reported."""
        if self._sink is not None:
            self._sink.abandon()


class ResumedOutput(RecordOutput):
    """Records to a file with a journal beside it. Rows that an earlier run has finished are not written again."""

    def __init__(
        self,
        options: RunOptions,
        written: Written,
        on_error: Callable[[Record], None],
        counted: Callable[[], Mapping[str, Any]],
    ) -> None:
        assert options.output is not None
        self._format: writers.Format = options.format
        self._on_error, self._counted, self._row_written = on_error, counted, written
        self.file = Resumable(options.output)
        mark = self.file.mark
        self.done = self.again = mark.rows
        self.finished, self.tally = mark.done, mark.tally
        self._ordered = None
        self._echo: Echo | None = None

    @property
    def differs(self) -> bool:
        return self._echo is not None and self._echo.differs

    def begin(self, identity: OutputIdentity, span: int) -> OutputIdentity:
        if self.file.header is not None:
            identity = check_same(self.file.name, self.file.header, identity)
            self.compared = identity.input is not None and self.file.header.get("input") == identity.input
        if self.finished:
            return identity
        self.file.start(identity.header(), span)
        self.again = self.done - self.done % span
        begun = self.file.mark.bytes > 0
        writer = writers.open_writer(self._format, Unclosed(self.file.write), on_error=self._on_error, begun=begun)
        self._ordered = writers.Ordered(writer, start=self.done, written=self._written)
        if self.again < self.done:
            self._echo = Echo(self.file, self._format, self.again, self.done)
        return identity

    def consume(self, row: InputRow | BadRow) -> None:
        self.file.consume(row)

    def end_of_input(self, rows: int) -> None:
        self.file.end_of_input(rows)

    def put(self, index: int, records: Sequence[Record]) -> None:
        if index >= self.done:
            super().put(index, records)
        elif self._echo is not None:
            self._echo.put(index, records)

    def stop(self, index: int, records: Sequence[Record]) -> None:
        """Leave the row to the next run."""

    def close(self, *, cut_short: bool) -> None:
        # rows that finished early or on the way out are left to the next run, which decodes them undisturbed
        if not cut_short:
            super().close(cut_short=False)
        if self.hurried:
            self.file.release()  # the newest mark is a second old at most
        else:
            self.file.close(done=not cut_short)

    def abandon(self) -> None:
        self.file.abandon()

    def _written(self, index: int, records: Sequence[Record]) -> None:
        self._row_written(index, records)
        self.file.written(index + 1, self._counted())


def _visible(text: str) -> str:
    from genctl.render.widgets import visible

    return visible(text)


@contextmanager
def opened(output: RecordOutput, interrupted: Callable[[], Any]) -> Iterator[RecordOutput]:
    """Close the output at the end; after an error abandon it, so that an old file is kept."""
    try:
        yield output
    except BaseException:
        output.abandon()
        raise
    output.close(cut_short=bool(interrupted()))


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
    timing = None
    if options.timing:
        timing = {"load_s": load_s, "prefill_s": result.prefill_s, "decode_s": result.decode_s}
    records = []
    for number, sequence in enumerate(result.sequences):
        hypothesis = sequence.hypothesis
        if options.format == "text" and not texts:  # the same as on a terminal
            hypothesis = dataclasses.replace(hypothesis, text="".join(f"<{id}>" for id in hypothesis.tokens))
        if options.echo:
            between = "\t" if encoder_decoder else ""
            hypothesis = dataclasses.replace(hypothesis, text=f"{result.prompt}{between}{hypothesis.text}")
        extra: dict[str, Any] = dict(result.remarks)
        if result.drafted:
            extra |= {"drafted": result.drafted, "accepted": result.accepted}
        if "beam" in result.strategy:
            extra["parents"] = list(sequence.parents)
        records.append(
            record(
                row,
                number,
                hypothesis,
                prompt_text=result.prompt,
                model=result.model,
                strategy=result.strategy,
                seed=result.seed,
                prompt_tokens=result.prompt_tokens,
                tokens=sequence.tokens if options.with_tokens else None,
                timing=timing,
                extra=extra,
                reused_tokens=result.reused if saved else None,
            )
        )
    return records


def ends_to_tell(wanted: Sequence[str], prompt: str, result: Result, *, texts: bool = True) -> list[str]:
    """A sentence for each sequence that --fail-on looks for. Without `texts`, a sequence without tokens is empty.

    `prompt` says which prompt it is, with a colon; "" if it is alone.
    """
    sentences = []
    for number, sequence in enumerate(result.sequences, 1):
        what = f"{prompt}{f'sequence {number}' if len(result.sequences) > 1 else 'the text'}"
        if sequence.finish_reason in wanted:
            sentences.append(f"{what} ended by {sequence.finish_reason}")
        elif "empty" in wanted and not (sequence.text.strip() if texts else sequence.token_ids):
            sentences.append(f"{what} is empty")
        elif "unmet" in wanted and sequence.unmet:
            sentences.append(f"{what} lacks {listed(sequence.unmet)}")
    return sentences

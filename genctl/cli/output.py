"""Records of results, and where they go: nowhere (they have been shown), to a sink, or to an output to resume."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

from genctl.batch import writers
from genctl.batch.records import record
from genctl.batch.resumable import Resumable
from genctl.batch.rows import BadRow, InputRow
from genctl.cli.resume import Echo, OutputIdentity, check_same
from genctl.cli.run_options import RunOptions
from genctl.cli.shortfall import listed
from genctl.results import Result

Record = writers.Record
Written = Callable[[int, Sequence[Record]], object]


class Nowhere:
    """The writer of a live run: what it would write has been shown."""

    def write(self, record: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class RecordOutput(Protocol):
    """What a job needs to know of where its records go."""

    done: int  # rows whose records are out since an earlier run
    again: int  # the first row that is decoded: those before `done` are decoded for their neighbours' sake
    finished: bool  # whether there is nothing left to do
    compared: bool  # whether the input is known to be, byte by byte, what it was
    hurried: bool  # to be set where closing must not take its time

    @property
    def tally(self) -> Mapping[str, Any]:
        """What earlier runs have counted in the rows that are done."""

    @property
    def differs(self) -> bool:
        """Whether rows that were decoded again came out differently."""

    def begin(self, identity: OutputIdentity, span: int) -> OutputIdentity:
        """The checkpoint is known. Returns what is asked, with the seed that holds."""

    def consume(self, row: InputRow | BadRow) -> None:
        """The next row of the input, before anything is made of it."""

    def end_of_input(self, rows: int) -> None:
        """There are no more rows than these."""

    def put(self, index: int, records: Sequence[Record]) -> None:
        """What became of a row, in any order."""

    def stop(self, index: int, records: Sequence[Record]) -> None:
        """The run ends with this row, whatever came after it."""

    def close(self, *, cut_short: bool) -> None:
        """No more will come; `cut_short`: because the run was, and rows may be missing."""

    def abandon(self) -> None:
        """An error is being reported."""


class PlainOutput:
    """Records to standard output, a device or a new file, or `nowhere`."""

    def __init__(
        self, asked: RunOptions, written: Written, on_error: Callable[[Record], None], *, nowhere: bool
    ) -> None:
        self.done = self.again = 0
        self.finished = self.differs = self.compared = self.hurried = False
        self.tally: Mapping[str, Any] = {}
        self._sink: writers.Sink | None = None
        writer: writers.Writer = Nowhere()
        if not nowhere:
            self._sink = writers.open_output(asked.output, sys.stdout, force=asked.force)
            format = cast(writers.Format, "json" if asked.tree_format == "json" else asked.format)
            shown = _visible if self._sink.is_terminal and not (asked.raw or asked.tree_format) else str
            writer = writers.open_writer(format, self._sink, on_error=on_error, shown=shown)
        self._ordered = writers.Ordered(writer, unordered=asked.unordered, written=written)

    def begin(self, identity: OutputIdentity, span: int) -> OutputIdentity:
        return identity

    def consume(self, row: InputRow | BadRow) -> None:
        pass

    def end_of_input(self, rows: int) -> None:
        pass

    def put(self, index: int, records: Sequence[Record]) -> None:
        self._ordered.put(index, records)

    def stop(self, index: int, records: Sequence[Record]) -> None:
        self._ordered.put(index, records)
        self._ordered.drop()

    def close(self, *, cut_short: bool) -> None:
        self._ordered.close(partial=cut_short)

    def abandon(self) -> None:
        if self._sink is not None:
            self._sink.abandon()


class Resumed:
    """Records to a file with a journal beside it. Rows that an earlier run has finished are not written again."""

    def __init__(
        self,
        asked: RunOptions,
        written: Written,
        on_error: Callable[[Record], None],
        counted: Callable[[], Mapping[str, Any]],
    ) -> None:
        assert asked.output is not None
        self._format = cast(writers.Format, asked.format)
        self._on_error, self._counted, self._told = on_error, counted, written
        self.file = Resumable(asked.output)
        mark = self.file.mark
        self.done = self.again = mark.rows
        self.finished, self.tally = mark.done, mark.tally
        self.compared = self.hurried = False
        self._ordered: writers.Ordered | None = None
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
        writer = writers.open_writer(self._format, Unclosed(self.file), on_error=self._on_error, begun=begun)
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
            assert self._ordered is not None
            self._ordered.put(index, records)
        elif self._echo is not None:
            self._echo.put(index, records)

    def stop(self, index: int, records: Sequence[Record]) -> None:
        pass  # the next run may have better luck with it

    def close(self, *, cut_short: bool) -> None:
        # rows that finished early or on the way out are left to the next run, which makes them as an undisturbed one
        if self._ordered is not None and not cut_short:
            self._ordered.close()
        if self.hurried:
            self.file.release()  # the newest mark is a second old at most
        else:
            self.file.close(done=not cut_short)

    def abandon(self) -> None:
        self.file.abandon()

    def _written(self, index: int, records: Sequence[Record]) -> None:
        self._told(index, records)
        self.file.written(index + 1, self._counted())


class Unclosed:
    """A sink that a writer may close without closing it: the journal has the last word."""

    def __init__(self, file: Resumable) -> None:
        self.write = file.write

    def close(self) -> None:
        pass


def open_output(
    asked: RunOptions,
    written: Written,
    on_error: Callable[[Record], None],
    counted: Callable[[], Mapping[str, Any]],
    *,
    nowhere: bool,
) -> RecordOutput:
    """The output that is asked for.

    `written` is told of each row that is out, `on_error` of the failures that the format has no place for; `counted`
    gives what the journal is to keep for the next run.
    """
    if asked.resume:
        return Resumed(asked, written, on_error, counted)
    return PlainOutput(asked, written, on_error, nowhere=nowhere)


def _visible(text: str) -> str:
    from genctl.render.widgets import visible

    return visible(text)


@contextmanager
def opened(output: RecordOutput, interrupted: Callable[[], Any]) -> Iterator[RecordOutput]:
    """An output that an error cuts short is given up, so that an old file is not lost to it."""
    try:
        yield output
    except BaseException:
        output.abandon()
        raise
    output.close(cut_short=bool(interrupted()))


def records_of(
    asked: RunOptions,
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
    if asked.timing:
        timing = {"load_s": load_s, "prefill_s": result.prefill_s, "decode_s": result.decode_s}
    records = []
    for number, sequence in enumerate(result.sequences):
        hypothesis = sequence.hypothesis
        if asked.format == "text" and not texts:  # what a terminal shows, in a pipe
            hypothesis = dataclasses.replace(hypothesis, text="".join(f"<{id}>" for id in hypothesis.tokens))
        if asked.echo:
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
                tokens=sequence.tokens if asked.with_tokens else None,
                timing=timing,
                extra=extra,
                reused_tokens=result.reused if saved else None,
            )
        )
    return records


def ends_to_tell(wanted: Sequence[str], row: InputRow, result: Result, *, texts: bool = True) -> list[str]:
    """What --fail-on has to say of a row's sequences. Where there are no `texts`, one without tokens is empty."""
    found = []
    for number, sequence in enumerate(result.sequences):
        what = f"prompt {row.id}, sequence {number}"
        if sequence.finish_reason in wanted:
            found.append(f"{what} ended by {sequence.finish_reason}")
        elif "empty" in wanted and not (sequence.text.strip() if texts else sequence.token_ids):
            found.append(f"{what} is empty")
        elif "unmet" in wanted and sequence.unmet:
            found.append(f"{what} lacks {listed(sequence.unmet)}")
    return found

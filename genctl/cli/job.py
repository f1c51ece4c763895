"""From what was asked to what is written: everything checked first, then loaded, then decoded and shown."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from genctl import events as told
from genctl.batch import readers, writers
from genctl.batch.records import error_record, record
from genctl.batch.rows import BadRow, InputRow
from genctl.batch.seeds import random_seed, row_seed
from genctl.cli import searching, strategy
from genctl.cli.interrupt import Interrupt
from genctl.cli.recording import EventFile
from genctl.config import settings
from genctl.config.layers import Layer, Resolved, overlay, resolve, row_layer
from genctl.errors import CheckError, Exit, GenctlError, UsageError
from genctl.results import Collector, Result

if TYPE_CHECKING:
    from genctl.render.live import RunView
    from genctl.session import Report, Request, Session

WIDTH = 16  # prompts decoded at once where nobody watches
SHOWN_TOP = 3  # alternatives shown with --scores on a terminal unless --top-logprobs says otherwise


@dataclass(frozen=True)
class Asked:
    """The command line of a generating command, parsed."""

    arguments: tuple[str, ...] = ()
    input: str | None = None
    input_format: str | None = None
    output: str | None = None
    force: bool = False
    format: str = "text"
    presets: tuple[str, ...] = ()
    flags: Sequence[Layer] = ()
    echo: bool = False
    scores: bool = False
    top_logprobs: int | None = None
    explain: bool = False
    strategy: str = ""  # as named by --strategy
    events: str | None = None
    fail_on: tuple[str, ...] = ()
    unordered: bool = False
    timing: bool = False
    dry: bool = False
    quiet: bool = False
    verbose: bool = False
    color: str = "auto"
    allow_pickle: bool = False
    trust_remote_code: bool = False
    allow_plugins: bool = False
    view: Literal["run", "beam"] = "run"
    beneath: Sequence[Layer] = ()  # what the command itself sets, below everything else
    stream: bool = False
    tree: bool = False
    tree_format: Literal["text", "dot", "json"] | None = None


def perform(asked: Asked) -> int | None:
    """Do what was asked. Returns the exit status, or None if there is no prompt to be had."""
    _check(asked)
    layers = [*asked.beneath, *settings.standing_layers(asked.presets), *asked.flags]
    early = resolve(layers, tentative=True)
    if asked.view == "beam":
        searching.check_search(early)
    if asked.dry:
        return _dry(asked, early, layers)
    rows = readers.open_prompts(
        asked.arguments,
        asked.input,
        sys.stdin,
        stdin_is_terminal=sys.stdin is None or _is_terminal(sys.stdin),
        format=asked.input_format,  # type: ignore[arg-type]
    )
    if rows is None:
        return None
    with Interrupt() as interrupt, ExitStack() as stack:
        stack.enter_context(rows)
        return Job(asked, layers, early, interrupt).run(iter(rows))


def _check(asked: Asked) -> None:
    """Everything that flags alone can get wrong. Raises UsageError."""
    if asked.top_logprobs is not None and asked.top_logprobs < 0:
        raise UsageError(f"--top-logprobs {asked.top_logprobs}: must be at least 0")
    if asked.force and asked.output is None:
        raise UsageError("--force replaces an existing --output file, but there is no --output")
    if asked.timing and asked.format in ("text", "tsv"):
        raise UsageError(f"--timing adds seconds to records, but --format {asked.format} has no place for them")
    searching.check_asked(asked)


def _dry(asked: Asked, early: Resolved, layers: Sequence[Layer]) -> int:
    """The resolved job as TOML; only the checkpoint's settings are read, not its weights."""
    from genctl.config.dry import to_toml
    from genctl.session import planned

    flags = {"allow_pickle": asked.allow_pickle, "trust_remote_code": asked.trust_remote_code}
    sys.stdout.write(to_toml(planned(early.runtime, layers, **flags)))
    return int(Exit.DONE)


@dataclass
class Job:
    """One run of a generating command: what is asked stays, what is decoded passes through."""

    asked: Asked
    layers: Sequence[Layer]
    early: Resolved  # what the layers say before the checkpoint has had its word
    interrupt: Interrupt
    failed: int = 0
    checks: list[str] = field(default_factory=list)
    rows: dict[str, InputRow] = field(default_factory=dict)  # those that are being decoded
    load_s: float = 0.0
    seed: int = 0

    def run(self, rows: Iterator[InputRow | BadRow]) -> int:
        """Load, decode, write. Returns the exit status."""
        from genctl.render.console import make_consoles

        asked = self.asked
        self.out, self.err = make_consoles(asked.color)  # type: ignore[arg-type]
        self.live = (
            asked.output is None
            and asked.format == "text"
            and _is_terminal(sys.stdout)
            and not (asked.stream or asked.tree_format)
        )
        search = searching.Search(asked, self.err, live=self.live)
        with ExitStack() as stack:
            ordered = stack.enter_context(self._output())
            trace = stack.enter_context(EventFile(Path(asked.events))) if asked.events else None
            view = stack.enter_context(self._view())
            stack.enter_context(search)
            session, base = self._load(view)
            self.seed = base.runtime.seed if base.runtime.seed is not None else random_seed()
            width = base.runtime.batch_size or (1 if self.live else WIDTH)
            search.begin(session.forward.is_encoder_decoder)
            collector = Collector(tokens=self._with_tokens or asked.format in ("json", "jsonl"))
            stream = session.stream(
                self._requests(rows, base, ordered), self._report(), width=width, interrupted=self.interrupt
            )
            self.interrupt.gentle = True
            with closing(stream):
                for event in stream:
                    if trace is not None:
                        trace.write(event)
                    if self.live or not isinstance(event, told.Failed):
                        view.feed(event)
                    search.feed(event)
                    result = collector.feed(event)
                    if result is not None:
                        self._take(result, session, ordered, search)
        return self._status()

    @contextmanager
    def _output(self) -> Iterator[writers.Ordered]:
        """Where records go. An output that an error cuts short is given up, so that an old file is not lost to it."""
        asked = self.asked
        if self.live or asked.stream:
            yield writers.Ordered(Nowhere(), unordered=asked.unordered)
            return
        sink = writers.open_output(asked.output, sys.stdout, force=asked.force)
        format = "json" if asked.tree_format == "json" else asked.format
        writer = writers.open_writer(format, sink, on_error=self._say_failed)  # type: ignore[arg-type]
        ordered = writers.Ordered(writer, unordered=asked.unordered)
        try:
            yield ordered
        except BaseException:
            sink.abandon()
            raise
        ordered.close(partial=bool(self.interrupt.status))

    # -- before decoding -----------------------------------------------------------------------------------------------

    def _load(self, view: RunView) -> tuple[Session, Resolved]:
        """The checkpoint, and the job as all layers say it. What can be checked is checked before weights are read."""
        from genctl.session import Session

        asked = self.asked
        began = time.perf_counter()
        session = Session.load(
            self.early.runtime,
            allow_pickle=asked.allow_pickle,
            trust_remote_code=asked.trust_remote_code,
            allow_plugins=asked.allow_plugins,
            on_event=view.feed,
            layers=self.layers,
        )
        self.load_s = time.perf_counter() - began
        base = session.resolve(self.layers)
        kind = session.check(base)
        if asked.strategy:
            strategy.check(asked.strategy, kind)
        if asked.verbose:
            for note in (*base.notes, *session.loaded.notes):
                self.say(f"note: {note}")
        return session, base

    def _requests(
        self, rows: Iterator[InputRow | BadRow], base: Resolved, ordered: writers.Ordered
    ) -> Iterator[Request]:
        from genctl.session import Request

        for row in rows:
            try:
                if isinstance(row, BadRow):
                    raise _Bad(row.code, row.message)
                wanted = {**row.params, **{key: value for key, value in row.extra.items() if key != "reference"}}
                resolved = overlay(base, row_layer(wanted, row.where)) if wanted else base
            except (_Bad, GenctlError) as error:
                code, message = (error.kind, error.text) if isinstance(error, _Bad) else (error.code, error.message)
                self._failure(row.id, row.index, code, message, ordered)
                continue
            self.rows[row.id] = row
            seed = resolved.runtime.seed if "seed" in row.params else None
            yield Request(
                row.id,
                resolved,
                row_seed(self.seed, row.id, row.index) if seed is None else seed,
                row.prompt,
                row.prompt_ids,
                row.messages,
            )

    def _report(self) -> Report:
        from genctl.session import Report

        asked = self.asked
        top = asked.top_logprobs
        if top is None:
            top = SHOWN_TOP if asked.scores and asked.format == "text" else 0
        return Report(top, asked.scores or top > 0, asked.explain)

    @property
    def _with_tokens(self) -> bool:
        return self.asked.scores or self.asked.top_logprobs is not None or self.asked.explain

    def _view(self) -> RunView:
        """What is shown. Where records are written instead, only the summary is, and what --scores asks for."""
        from genctl.render.beam import BeamView
        from genctl.render.console import discard
        from genctl.render.live import RunView

        asked = self.asked
        details = asked.scores or asked.explain
        several = len(asked.arguments) != 1 or self.early.generation.num_return_sequences > 1
        if self.live and asked.view == "beam":
            return BeamView(
                self.out,
                self.err,
                echo=asked.echo,
                scores=asked.scores or (asked.top_logprobs or 0) > 0,
                top=self._report().top,
                explain=asked.explain,
                labels=several,
                quiet=asked.quiet,
                verbose=asked.verbose,
                tree=asked.tree,
                formula=not asked.quiet,
            )
        out = self.out if self.live else self.err if details and asked.format == "text" else discard()
        return RunView(
            out,
            self.err,
            live=self.live,
            echo=asked.echo,
            scores=asked.scores or (asked.top_logprobs or 0) > 0,
            top=self._report().top,
            explain=asked.explain,
            labels=several,
            quiet=asked.quiet or not (self.live or _is_terminal(sys.stderr) or asked.verbose),
            verbose=asked.verbose,
        )

    # -- while decoding ------------------------------------------------------------------------------------------------

    def _take(self, result: Result, session: Session, ordered: writers.Ordered, search: searching.Search) -> None:
        row = self.rows.pop(result.lane)
        if result.error is not None:
            self._failure(row.id, row.index, result.error.code, result.error.message, ordered)
            return
        records = []
        timing = None
        if self.asked.timing:
            timing = {"load_s": self.load_s, "prefill_s": result.prefill_s, "decode_s": result.decode_s}
        for number, sequence in enumerate(result.sequences):
            hypothesis = sequence.hypothesis
            self._check_end(row, number, hypothesis)
            if self.asked.echo:
                between = "\t" if session.forward.is_encoder_decoder else ""
                hypothesis = dataclasses.replace(hypothesis, text=f"{result.prompt}{between}{hypothesis.text}")
            extra: dict[str, Any] = {}
            if result.drafted:
                extra = {"drafted": result.drafted, "accepted": result.accepted}
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
                    tokens=sequence.tokens if self._with_tokens else None,
                    timing=timing,
                    extra=extra,
                )
            )
        ordered.put(row.index, search.records(row.id) or records)

    def _check_end(self, row: InputRow, number: int, hypothesis: told.Hypothesis) -> None:
        wanted = self.asked.fail_on
        what = f"prompt {row.id}, sequence {number}"
        if hypothesis.reason in wanted:
            self.checks.append(f"{what} ended by {hypothesis.reason}")
        elif "empty" in wanted and not hypothesis.text.strip():
            self.checks.append(f"{what} is empty")

    def _failure(self, id: str, index: int, code: str, message: str, ordered: writers.Ordered) -> None:
        self.failed += 1
        made = error_record(id, code, message)
        if self.live or self.asked.stream:
            self._say_failed(made)
        ordered.put(index, [made])

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _status(self) -> int:
        if self.interrupt.status:
            return self.interrupt.status
        if self.checks:
            more = f" (and {len(self.checks) - 1} more)" if len(self.checks) > 1 else ""
            raise CheckError(f"--fail-on: {self.checks[0]}{more}")
        return int(Exit.ROWS_FAILED if self.failed else Exit.DONE)

    def say(self, line: str) -> None:
        """One line on standard error."""
        from genctl.render.parts import visible

        print(visible(line), file=sys.stderr, flush=True)

    def _say_failed(self, made: Mapping[str, Any]) -> None:
        error = made["error"]
        self.say(f"error: prompt {made['id']}: {error['message']}")


def _is_terminal(stream: IO[str] | None) -> bool:
    """Whether a person is at the other end; a stream that is missing or closed counts as a terminal's silence."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


class _Bad(Exception):
    """A row that the reader refused."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


class Nowhere:
    """The writer of a live run: what it would write has been shown."""

    def write(self, record: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass

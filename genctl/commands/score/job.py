"""`genctl score` at work: texts are read, scored, shown and written."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from genctl.commands.engine_choice import LOCAL, EngineChoice, engine_of
from genctl.commands.job import WIDTH, Job, Rows
from genctl.commands.options import shown_top
from genctl.commands.score import token_heat
from genctl.commands.score.options import ScoreOptions
from genctl.commands.score.token_heat import figures
from genctl.config.layers import Resolved
from genctl.engines.protocol import Detail, Scored, ScoringOptions, TextToScore, trained_length_note
from genctl.errors import GenctlError, InputError, UsageError, count
from genctl.io import scored, writers
from genctl.io.record_output import RecordOutput
from genctl.io.records import SCHEMA, finite, token_entry
from genctl.io.rows import BadRow, InputRow
from genctl.params import Runtime
from genctl.terminal import theme, widgets
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.progress_bars import LoadingBar
from genctl.terminal.standard_streams import is_terminal
from genctl.terminal.summary import put, put_words
from genctl.terminal.widgets import no_room

if TYPE_CHECKING:
    from genctl.commands.page_file import PageFile


SORTED = 4  # batches that are sorted by length together
BY = {"mean": "mean log-probability", "total": "total log-probability", "bits-per-byte": "bits per byte"}


class ScoreJob(Job[ScoreOptions]):
    """One run of `genctl score`."""

    what = "text"
    reading: ClassVar = {"shape": scored.ROW}

    def __init__(self, options: ScoreOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        super().__init__(options, interrupt, choice)
        self.open_consoles()
        self.shown = self.live = options.on_screen
        self.details = options.scores or options.top_logprobs is not None
        self.top = shown_top(options)
        self.texts = self.tokens = self.bytes = 0
        self.nll = 0.0
        self.mapped = False  # a heat map was shown

    def prepare(self) -> int | None:
        """Settings without those of the checkpoint."""
        for name in ("context", "target"):
            try:
                (getattr(self.options, name) or "").encode()
            except UnicodeEncodeError as error:
                raise UsageError(f"--{name}: not UTF-8 at character {error.start + 1}") from None
        return super().prepare()

    def check_early(self, resolved: Resolved) -> None:
        """Raises UsageError for settings that cannot be used together with the options."""
        super().check_early(resolved)
        flags = any("row_timeout" in layer.values for layer in self.layers if layer.declared == "command")
        if flags and resolved.runtime.backend is None:
            raise UsageError(
                "--row-timeout is for requests to a server, and there is no --backend: a checkpoint here reads several "
                "texts in one pass"
            )

    def open(self, stack: ExitStack) -> None:
        """Open the output."""
        options = self.options
        writer: writers.Writer = writers.Unclosed()
        if not self.shown:
            sink = self.sink(stack, options.output)
            writer = writers.open_writer(options.format, sink, on_error=self.print_failure, formats=scored.FORMATS)
        self.output: RecordOutput = RecordOutput(writer)

    def load(self) -> None:
        """Load the checkpoint, and check whether it can score texts as the options say."""
        bar = LoadingBar(self.err, time.monotonic)
        with closing(bar):
            self.engine = engine = self.load_engine(
                replace(self.early, runtime=self.used_runtime()),
                on_event=None if self.options.quiet else bar.show,
                need_tokenizer=False,
                live=self.shown,
            )
        if self.early.runtime.backend is not None:
            self.settle(engine, self.layers)
        self.name = engine.about.name
        width = engine.width(self.early, 1 if self.shown or self.lone else WIDTH)
        self.outcomes = engine.score(self._wanted(), self.scoring(width), interrupted=self.interrupt)
        self.messages.detail(*engine.notes())

    def used_runtime(self) -> Runtime:
        """The settings of the checkpoint without those that are of no use here; a note says which."""
        runtime = self.early.runtime
        if runtime.backend is not None:
            return runtime
        for name, unset in (("prompt_cache", None), ("compile", False), ("row_timeout", None)):
            if getattr(runtime, name) != unset:  # a settings file says so
                place = self.early.origins[name]
                self.messages.note(f"{name} ({place}) is not used: genctl score reads every text as a whole")
                runtime = replace(runtime, **{name: unset})  # type: ignore[arg-type]  # each has its own type
        return runtime

    def deliver(self, stack: ExitStack) -> None:
        """Score the texts and write their records."""
        self.interrupt.gentle = True
        for row, outcome in self.outcomes:
            if isinstance(outcome, GenctlError):
                self.fail(row, outcome.code, outcome.message)
                continue
            self._show(row, outcome)
            trained = self.engine.about.trained
            if trained is not None and any(one.length > trained for one in outcome):
                self.messages.note_once(trained_length_note(trained), self.of(row))
            if self.page is not None:
                self._feed_page(self.page, row, outcome)
            self.output.put(row.index, [self._record(row, one) for one in outcome])
        self.messages.detail(*self.engine.done.findings)
        self.output.close(cut_short=bool(self.interrupt.status))

    def status(self) -> int:
        """The exit status. Prints the summary."""
        self._sum_up()
        status = super().status()
        self.messages.detail(*self.engine.done.shares)
        return status

    def scoring(self, width: int) -> ScoringOptions:
        """How texts are scored, `width` in a pass."""
        options = self.options
        return ScoringOptions(
            add_eos=options.add_eos,
            stride=options.stride,
            window=options.window,
            by=options.by or "mean",
            batch_size=width,
            chunk=width if self.shown else SORTED * width,
            detail=Detail(self.details or options.report is not None, self.top),
            captions=self.shown or self.details or bool(options.report),
            context=options.context,
            target=options.target,
            rank=options.rank,
            row_timeout=self.early.runtime.row_timeout,
        )

    # -- before scoring ------------------------------------------------------------------------------------------------

    def _wanted(self) -> Iterator[tuple[InputRow, TextToScore]]:
        rows = self._read(self.input)
        if self.options.rank and not self.options.has_rows:  # all texts are candidates of one row
            candidates: list[str] = []
            for row in rows:
                if isinstance(row, BadRow):
                    raise InputError(row.message)
                candidates.append(row.prompt or "")
            one = InputRow("0", 0, extra={"candidates": tuple(candidates)}, where="the candidates")
            rows = iter([one] if candidates else [])
        yield from self.usable(rows, self._texts_of)

    def _read(self, rows: Rows) -> Rows:
        """The rows, until a signal comes: what waits for input is ended at once, and what was read is scored."""
        while True:
            self.interrupt.gentle = False
            try:
                row = next(rows, None)
            except SystemExit:
                return
            finally:
                self.interrupt.gentle = True
            if row is None:
                return
            yield row

    def _texts_of(self, row: InputRow) -> TextToScore:
        """What is scored of a row: its own fields, else the flags. Raises InputError where they contradict."""
        candidates = row.extra.get("candidates", ())
        context = row.extra.get("context", self.options.context)
        target = row.extra.get("target", self.options.target)
        if self.options.rank and not candidates:
            raise InputError(f"{row.where}: --rank sorts candidates, and the row has none")
        if candidates and target is not None:
            raise InputError(f"{row.where}: the row has candidates, and --target is something else to score")
        return TextToScore(row.prompt or "", context, target, tuple(candidates))

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _record(self, row: InputRow, result: Scored) -> dict[str, Any]:
        """The record of a text. `nll` is in nats, summed over the last `tokens` of `token_ids`: the scored ones."""
        named = {name: row.extra.get(name, getattr(self.options, name)) for name in ("context", "target")}
        extra: dict[str, Any] = {name: text for name, text in named.items() if text is not None}
        if result.rank is not None:
            extra |= {"rank": result.rank, "candidate": result.candidate}
        if result.backend:
            extra |= {"backend": result.backend, "exact": False}
        if row.columns:
            extra["input"] = row.columns
        fields = {
            "schema": SCHEMA,
            "id": row.id,
            "text": row.prompt or "" if "target" in extra else result.text,
            "token_ids": list(result.token_ids),
            "nll": result.nll,
            "tokens": result.count,
            "ppl": result.ppl,
            "bpb": result.bpb,
            "bits": result.bits,
            "bytes": result.bytes,
            "model": self.name,
            **extra,
        }
        if self.details:
            fields["scores"] = [token_entry(token) for token in result.tokens]
        record: dict[str, Any] = finite(fields)
        return record

    def _feed_page(self, page: PageFile, row: InputRow, outcome: Sequence[Scored]) -> None:
        """Give the page the texts of a row with their figures."""
        for one in outcome:
            lane = row.id if one.rank is None else f"{row.id} rank {one.rank}"
            before = row.extra.get("context", self.options.context) or (row.prompt if one.text != row.prompt else "")
            prompt, words = f"{before or ''}{one.lead}", figures(one)
            page.scored(lane, prompt, one.tokens, model=self.name, figures=words, input=row.columns or None)

    def _show(self, row: InputRow, outcome: Sequence[Scored]) -> None:
        """Count a row, and show it: on a terminal, or with --scores on standard error beside results in a pipe."""
        for one in outcome:
            self.texts += 1
            self.nll += one.nll
            self.tokens += one.count
            self.bytes += one.bytes
        if not self.shown and not (self.details and self.options.format == "text"):
            return
        from rich.text import Text

        console = self.out if self.shown else self.err
        width, ranked = console.width, outcome[0].rank is not None
        lines = []
        if not (self.lone or self.options.rank):
            lines.append(widgets.header(width, f"text {row.name}", row.prompt or ""))
        if ranked and self.shown:
            lines += token_heat.ranking(outcome, BY[self.options.by or "mean"], width)
        for one in outcome:
            if ranked and self.details:
                lines.append(widgets.header(width, f"rank {one.rank}", one.text))
            if self.shown and not ranked:
                context = row.prompt if one.text != row.prompt else row.extra.get("context", self.options.context)
                lines += token_heat.heat(context or "", one.lead, one.tokens, width)
                self.mapped = True
            if self.details:
                lines += token_heat.token_table(one.tokens, width, self.top)
        for line in lines:
            console.print(line)
        if self.shown and not ranked:
            put(console, Text(token_heat.figures(outcome[0])))

    def _sum_up(self) -> None:
        from rich.text import Text

        if self.options.quiet:
            return
        if self.mapped:
            put_words(self.out, token_heat.legend())
        left_out = no_room(self.out.width) if self.shown and self.details and self.texts else []
        if left_out:
            self.out.print(Text(f"no room for {', '.join(left_out)}", style=theme.DIM))
        wanted = self.options.verbose or self.shown or is_terminal(sys.stderr)
        if not wanted or self.options.rank or self.texts + self.failed < (1 if self.options.verbose else 2):
            return
        words = [count(self.texts, "text")]
        if self.tokens:
            words.append(token_heat.figures(Scored("", (), self.nll, self.tokens, self.bytes, ())))
        if self.failed:
            words.append(f"{self.failed} failed")
        self.messages.print(" · ".join(words))


def score(options: ScoreOptions) -> int | None:
    """`genctl score`."""
    return ScoreJob.perform(options, engine_of(options))

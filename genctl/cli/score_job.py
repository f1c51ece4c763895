"""`genctl score` at work: texts are read, scored, shown and written."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from genctl.batch import scored, writers
from genctl.batch.readers import format_of
from genctl.batch.records import error_record
from genctl.batch.rows import BadRow, InputRow
from genctl.cli.inputs import is_terminal, prompts_of
from genctl.cli.interrupt import Interrupt
from genctl.cli.job import WIDTH, Job
from genctl.cli.output import nowhere
from genctl.cli.score_options import ScoreOptions, check_encoding
from genctl.config import settings
from genctl.config.layers import Resolved, resolve
from genctl.errors import GenctlError, InputError
from genctl.plural import count

if TYPE_CHECKING:
    from genctl.render.token_heat import Figures
    from genctl.scoring.scorer import Scored, Scorer
    from genctl.scoring.texts import TextToScore
    from genctl.session import Session

Rows = Iterator[InputRow | BadRow]

SORTED = 4  # batches that are sorted by length together
SHOWN_TOP = 3  # alternatives shown with --scores on a terminal unless --top-logprobs says otherwise
BY = {"mean": "mean log-probability", "total": "total log-probability", "bits-per-byte": "bits per byte"}


def perform(options: ScoreOptions) -> int | None:
    """Do what the options say. Returns the exit status, or None if there is no text."""
    check_encoding(options)
    early = resolve([*settings.standing_layers(), *options.flags], tentative=True)
    rows = prompts_of(options, fields=scored.fields)
    if rows is None:
        return None
    with Interrupt() as interrupt, rows:
        return ScoreJob(options, early, iter(rows), interrupt, lone=rows.is_alone()).run()


class ScoreJob(Job[ScoreOptions]):
    """One run of `genctl score`."""

    def __init__(self, options: ScoreOptions, early: Resolved, rows: Rows, interrupt: Interrupt, *, lone: bool) -> None:
        super().__init__(options, interrupt)
        self.early, self.rows = early, rows
        self.open_consoles()
        self.live = options.output is None and options.format == "text" and is_terminal(sys.stdout)
        self.details = options.scores or options.top_logprobs is not None
        shown = SHOWN_TOP if options.scores and options.format == "text" else 0
        self.top = shown if options.top_logprobs is None else options.top_logprobs
        self.lone = lone
        self.labels = not (options.rank or self.lone)
        self.subjects: dict[str, str] = {}  # what messages call the texts that failed, by id
        self.texts = self.tokens = self.bytes = 0
        self.nll = 0.0
        self.mapped = False  # a heat map was shown

    def open(self, stack: ExitStack) -> None:
        """Open the output."""
        options = self.options
        writer: writers.Writer = nowhere()
        if not self.live:
            sink = self.sink(stack, options.output, force=options.force, stdout=sys.stdout)
            writer = scored.open_writer(options.format, sink, on_error=self._say_failed)
        self.ordered = writers.Ordered(writer)

    def load(self) -> None:
        """Load the checkpoint."""
        from genctl.render.loading_bar import LoadingBar

        options, runtime = self.options, self.early.runtime
        for name, unset in (("prompt_cache", None), ("compile", False)):
            if getattr(runtime, name) != unset:  # a settings file says so
                place = self.early.origins[name]
                self.note(f"{name} ({place}) is not used: genctl score reads every text as a whole")
                runtime = replace(runtime, **{name: unset})  # type: ignore[arg-type]  # each has its own type
        bar = LoadingBar(self.err, time.monotonic)
        with closing(bar):
            on_event = None if options.quiet else bar.show
            session = self.load_session(runtime, on_event=on_event, need_tokenizer=False)
        self.detail(*session.loaded.notes)
        self.scorer = self._scorer(session)

    def deliver(self, stack: ExitStack) -> None:
        """Score the texts and write their records."""
        self.interrupt.gentle = True
        for row, outcome in self.scorer.score(self._wanted(), self.interrupt):
            if isinstance(outcome, GenctlError):
                self._failure(row, outcome.code, outcome.message)
                continue
            self._show(row, outcome)
            self.ordered.put(row.index, [self._record(row, one, self.scorer.loaded.name) for one in outcome])
        self.detail(*self.scorer.findings)
        self.ordered.close(partial=bool(self.interrupt.status))

    def status(self) -> int:
        """The exit status. Prints the summary."""
        self._sum_up()
        return super().status()

    def _scorer(self, session: Session) -> Scorer:
        from genctl.scoring.passes import Detail
        from genctl.scoring.scorer import Options, Scorer

        options = self.options
        width = session.width(self.early, 1 if self.live else WIDTH)
        scoring = Options(
            add_eos=options.add_eos,
            stride=options.stride,
            window=options.window,
            by=options.by or "mean",
            batch_size=width,
            chunk=width if self.live else SORTED * width,
            detail=Detail(self.details, self.top),
            captions=self.live or self.details,
        )
        scorer = Scorer(session, scoring)
        scorer.check(context=options.context, target=options.target, rank=options.rank)
        return scorer

    # -- before scoring ------------------------------------------------------------------------------------------------

    def _wanted(self) -> Iterator[tuple[InputRow, TextToScore]]:
        one_row = self.options.rank and not self._jsonl
        rows = self._read(self.rows)
        for row in self._gathered(rows) if one_row else rows:
            if isinstance(row, BadRow):
                self._failure(row, row.code, row.message)
                continue
            try:
                yield row, self._texts_of(row)
            except InputError as error:
                self._failure(row, error.code, error.message)

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
        from genctl.scoring.texts import TextToScore

        candidates = row.extra.get("candidates", ())
        context = row.extra.get("context", self.options.context)
        target = row.extra.get("target", self.options.target)
        if self.options.rank and not candidates:
            raise InputError(f"{row.where}: --rank sorts candidates, and the row has none")
        if candidates and target is not None:
            raise InputError(f"{row.where}: the row has candidates, and --target is something else to score")
        return TextToScore(row.prompt or "", context, target, tuple(candidates))

    @property
    def _jsonl(self) -> bool:
        return format_of(self.options.input_format, self.options.input or "") == "jsonl"

    def _gathered(self, rows: Rows) -> Iterator[InputRow]:
        """All texts of the input as candidates of one row. Raises InputError for the first that cannot be read."""
        candidates: list[str] = []
        for row in rows:
            if isinstance(row, BadRow):
                raise InputError(row.message)
            candidates.append(row.prompt or "")
        if candidates:
            yield InputRow("0", 0, extra={"candidates": tuple(candidates)}, where="the candidates")

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _record(self, row: InputRow, one: Scored, model: str) -> dict[str, Any]:
        named = {name: row.extra.get(name, getattr(self.options, name)) for name in ("context", "target")}
        given: dict[str, Any] = {name: text for name, text in named.items() if text is not None}
        if one.rank is not None:
            given |= {"rank": one.rank, "candidate": one.candidate}
        return scored.score_record(
            row.id,
            row.prompt or "" if "target" in given else one.text,
            one.token_ids,
            tokens=one.count,
            model=model,
            given=given,
            scores=one.tokens if self.details else None,
            **{name: getattr(one, name) for name in ("nll", "ppl", "bpb", "bits", "bytes")},
        )

    def _show(self, row: InputRow, outcome: Sequence[Scored]) -> None:
        """Count a row. Show it on a terminal, and with --scores on standard error beside results in a pipe."""
        from rich.text import Text

        from genctl.render import token_heat, widgets
        from genctl.render.summary import put

        for one in outcome:
            self.texts += 1
            self.nll += one.nll
            self.tokens += one.count
            self.bytes += one.bytes
        console = self.out if self.live else self.err
        if not self.live and not (self.details and self.options.format == "text"):
            return
        width = console.width
        lines = []
        if self.labels:
            lines.append(widgets.header(width, f"text {row.name}", row.prompt or ""))
        ranked = outcome[0].rank is not None
        if ranked and self.live:
            entries = [token_heat.RankedToken(one.text, _figures(one)) for one in outcome]
            lines += token_heat.ranking(entries, BY[self.options.by or "mean"], width)
        for one in outcome:
            if ranked and self.details:
                lines.append(widgets.header(width, f"rank {one.rank}", one.text))
            if not ranked and self.live:
                context = row.prompt if one.text != row.prompt else row.extra.get("context", self.options.context)
                lines += token_heat.heat(context or "", one.lead, one.tokens, width)
                self.mapped = True
            if self.details:
                lines += token_heat.token_table(one.tokens, width, self.top)
        for line in lines:
            console.print(line)
        if self.live and not ranked:
            put(console, Text(token_heat.figures(_figures(outcome[0]))))

    def _failure(self, row: InputRow | BadRow, code: str, message: str) -> None:
        self.failed += 1
        record = error_record(row.id, code, message)
        self.subjects[row.id] = self.of(row, what="text")
        if self.live:
            self._say_failed(record)
        self.ordered.put(row.index, [record])

    def _sum_up(self) -> None:
        from rich.text import Text

        from genctl.render import theme, token_heat
        from genctl.render.summary import put_words
        from genctl.render.widgets import no_room

        if self.options.quiet:
            return
        if self.mapped:
            put_words(self.out, token_heat.legend())
        left_out = no_room(self.out.width) if self.live and self.details and self.texts else []
        if left_out:
            self.out.print(Text(f"no room for {', '.join(left_out)}", style=theme.DIM))
        wanted = self.options.verbose or self.live or is_terminal(sys.stderr)
        if not wanted or self.options.rank or self.texts + self.failed < (1 if self.options.verbose else 2):
            return
        words = [count(self.texts, "text")]
        if self.tokens:
            words.append(token_heat.figures(_sums(self.nll, self.tokens, self.bytes)))
        if self.failed:
            words.append(f"{self.failed} failed")
        self.say(" · ".join(words))

    def _say_failed(self, record: Mapping[str, Any]) -> None:
        self.say(f"error: {self.subjects.pop(record['id'], '')}{record['error']['message']}")


def _figures(one: Scored) -> Figures:
    return _sums(one.nll, one.count, one.bytes)


def _sums(nll: float, tokens: int, bytes: int) -> Figures:
    from genctl.render.token_heat import Figures
    from genctl.scoring.scorer import perplexity

    bits = nll / math.log(2)
    return Figures(nll, bits, perplexity(nll, tokens), bits / bytes if bytes else math.nan, tokens)

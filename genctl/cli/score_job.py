"""`genctl score`, from what was asked to what is written."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from genctl.batch import scored, writers
from genctl.batch.records import error_record
from genctl.batch.rows import BadRow, InputRow
from genctl.cli.inputs import is_terminal, prompts_of
from genctl.cli.interrupt import Interrupt
from genctl.cli.job import WIDTH, Nowhere
from genctl.cli.score_options import ScoreOptions, check_encoding
from genctl.config import settings
from genctl.config.layers import Resolved, resolve
from genctl.errors import Exit, GenctlError, InputError

if TYPE_CHECKING:
    from genctl.render.heat import Figures
    from genctl.scoring.scorer import Scored, Scorer
    from genctl.scoring.texts import Wanted

SORTED = 4  # batches that are sorted by length together
SHOWN_TOP = 3  # alternatives shown with --scores on a terminal unless --top-logprobs says otherwise
BY = {"mean": "mean log-probability", "total": "total log-probability", "bits-per-byte": "bits per byte"}


def perform(asked: ScoreOptions) -> int | None:
    """Do what was asked. Returns the exit status, or None if there is no text to be had."""
    check_encoding(asked)
    early = resolve([*settings.standing_layers(), *asked.flags], tentative=True)
    rows = prompts_of(asked, fields=scored.fields)
    if rows is None:
        return None
    with Interrupt() as interrupt, rows:
        return ScoreJob(asked, early, interrupt).run(iter(rows))


class ScoreJob:
    """One run of `genctl score`."""

    def __init__(self, asked: ScoreOptions, early: Resolved, interrupt: Interrupt) -> None:
        from genctl.render.console import make_consoles

        self.asked, self.early, self.interrupt = asked, early, interrupt
        self.out, self.err = make_consoles(asked.color)  # type: ignore[arg-type]
        self.live = asked.output is None and asked.format == "text" and is_terminal(sys.stdout)
        self.details = asked.scores or asked.top_logprobs is not None
        shown = SHOWN_TOP if asked.scores and asked.format == "text" else 0
        self.top = shown if asked.top_logprobs is None else asked.top_logprobs
        self.labels = not asked.rank and len(asked.arguments) != 1
        self.texts = self.failed = self.tokens = self.bytes = 0
        self.nll = 0.0
        self.mapped = False  # whether a heat map was shown

    def run(self, rows: Iterator[InputRow | BadRow]) -> int:
        """Load, score, write. Returns the exit status."""
        with self._output() as ordered:
            scorer = self._load()
            self.interrupt.gentle = True
            for row, outcome in scorer.score(self._wanted(rows, ordered), self.interrupt):
                if isinstance(outcome, GenctlError):
                    self._failure(row.id, row.index, outcome.code, outcome.message, ordered)
                    continue
                self._show(row, outcome)
                ordered.put(row.index, [self._record(row, one, scorer.loaded.name) for one in outcome])
            for note in scorer.findings if self.asked.verbose else ():
                self._say(f"note: {note}")
        self._sum_up()
        return self.interrupt.status or int(Exit.ROWS_FAILED if self.failed else Exit.DONE)

    @contextmanager
    def _output(self) -> Iterator[writers.Ordered]:
        if self.live:
            yield writers.Ordered(Nowhere())
            return
        asked = self.asked
        sink = writers.open_output(asked.output, sys.stdout, force=asked.force)
        writer = scored.open_writer(asked.format, sink, on_error=self._say_failed)  # type: ignore[arg-type]
        ordered = writers.Ordered(writer)
        try:
            yield ordered
        except BaseException:
            sink.abandon()
            raise
        ordered.close(partial=bool(self.interrupt.status))

    def _load(self) -> Scorer:
        from genctl.render.loading_bar import LoadingBar
        from genctl.scoring.passes import Detail
        from genctl.scoring.scorer import Options, Scorer
        from genctl.session import Session

        asked, runtime = self.asked, self.early.runtime
        if runtime.prompt_cache is not None:  # a settings file says so
            if not asked.quiet:
                place = self.early.origins["prompt_cache"]
                self._say(f"note: prompt_cache ({place}) is not used: genctl score reads every text as a whole")
            runtime = replace(runtime, prompt_cache=None)
        if runtime.compile:  # so does this
            if not asked.quiet:
                place = self.early.origins["compile"]
                self._say(f"note: compile ({place}) is not used: genctl score reads every text as a whole")
            runtime = replace(runtime, compile=False)
        bar = LoadingBar(self.err, time.monotonic)
        with ExitStack() as stack:
            stack.callback(bar.close)
            session = Session.load(
                runtime,
                allow_pickle=asked.allow_pickle,
                trust_remote_code=asked.trust_remote_code,
                on_event=None if asked.quiet else bar.show,
            )
        if asked.verbose:
            for note in session.loaded.notes:
                self._say(f"note: {note}")
        width = session.width(self.early, 1 if self.live else WIDTH)
        options = Options(
            add_eos=asked.add_eos,
            stride=asked.stride,
            window=asked.window,
            by=asked.by or "mean",  # type: ignore[arg-type]
            batch_size=width,
            chunk=width if self.live else SORTED * width,
            detail=Detail(self.details, self.top),
            captions=self.live or self.details,
        )
        scorer = Scorer(session, options)
        scorer.check(context=asked.context, target=asked.target, rank=asked.rank)
        return scorer

    # -- before scoring ------------------------------------------------------------------------------------------------

    def _wanted(self, rows: Iterator[InputRow | BadRow], ordered: writers.Ordered) -> Iterator[tuple[InputRow, Wanted]]:
        for row in self._gathered(rows) if self.asked.rank and not self._jsonl else rows:
            if isinstance(row, BadRow):
                self._failure(row.id, row.index, row.code, row.message, ordered)
                continue
            try:
                yield row, self._asked_of(row)
            except InputError as error:
                self._failure(row.id, row.index, error.code, error.message, ordered)

    def _asked_of(self, row: InputRow) -> Wanted:
        """What a row says, and the flags where it says nothing. Raises InputError where they contradict each other."""
        from genctl.scoring.texts import Wanted

        candidates = row.extra.get("candidates", ())
        context = row.extra.get("context", self.asked.context)
        target = row.extra.get("target", self.asked.target)
        if self.asked.rank and not candidates:
            raise InputError(f"{row.where}: --rank sorts candidates, and the row has none")
        if candidates and target is not None:
            raise InputError(f"{row.where}: the row has candidates, and --target is something else to score")
        return Wanted(row.prompt or "", context, target, tuple(candidates))

    @property
    def _jsonl(self) -> bool:
        name = (self.asked.input or "").lower()
        return self.asked.input_format == "jsonl" or (
            self.asked.input_format is None and name.endswith((".jsonl", ".ndjson"))
        )

    def _gathered(self, rows: Iterator[InputRow | BadRow]) -> Iterator[InputRow]:
        """All texts of the input as candidates of one row. Raises InputError for the first that is none."""
        candidates: list[str] = []
        for row in rows:
            if isinstance(row, BadRow):
                raise InputError(row.message)
            candidates.append(row.prompt or "")
        if candidates:
            yield InputRow("0", 0, extra={"candidates": tuple(candidates)}, where="the candidates")

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _record(self, row: InputRow, one: Scored, model: str) -> dict[str, Any]:
        given: dict[str, Any] = {}
        context = row.extra.get("context", self.asked.context)
        target = row.extra.get("target", self.asked.target)
        if context is not None:
            given["context"] = context
        if target is not None:
            given["target"] = target
        if one.rank is not None:
            given |= {"rank": one.rank, "candidate": one.candidate}
        return scored.score_record(
            row.id,
            one.text if target is None else row.prompt or "",
            one.token_ids,
            nll=one.nll,
            tokens=one.count,
            ppl=one.ppl,
            bpb=one.bpb,
            bits=one.bits,
            bytes=one.bytes,
            model=model,
            given=given,
            scores=one.tokens if self.details else None,
        )

    def _show(self, row: InputRow, outcome: Sequence[Scored]) -> None:
        """Count it, and on a terminal (or, with --scores, beside the results in a pipe) show it."""
        from genctl.render import heat, parts

        for one in outcome:
            self.texts += 1
            self.nll += one.nll
            self.tokens += one.count
            self.bytes += one.bytes
        console = self.out if self.live else self.err
        if not self.live and not (self.details and self.asked.format == "text"):
            return
        width = console.width
        lines = []
        if self.labels:
            lines.append(parts.header(width, f"text {row.id}", row.prompt or ""))
        ranked = outcome[0].rank is not None
        if ranked and self.live:
            entries = [heat.RankedToken(one.text, _figures(one)) for one in outcome]
            lines += heat.ranking(entries, BY[self.asked.by or "mean"], width)
        for one in outcome:
            if ranked and self.details:
                lines.append(parts.header(width, f"rank {one.rank}", one.text))
            if not ranked and self.live:
                context = row.prompt if one.text != row.prompt else row.extra.get("context", self.asked.context)
                lines += heat.heat(context or "", one.lead, one.tokens, width)
                self.mapped = True
            if self.details:
                lines += heat.token_table(one.tokens, width, self.top)
        for line in lines:
            console.print(line)
        if self.live and not ranked:
            console.print(heat.figures(_figures(outcome[0])))

    def _failure(self, id: str, index: int, code: str, message: str, ordered: writers.Ordered) -> None:
        self.failed += 1
        made = error_record(id, code, message)
        if self.live:
            self._say_failed(made)
        ordered.put(index, [made])

    def _sum_up(self) -> None:
        from genctl.render import heat

        if self.asked.quiet:
            return
        if self.mapped:
            self.out.print(heat.legend())
        wanted = self.asked.verbose or self.live or is_terminal(sys.stderr)
        if not wanted or self.asked.rank or self.texts + self.failed < (1 if self.asked.verbose else 2):
            return
        words = [f"{self.texts} text{'' if self.texts == 1 else 's'}"]
        if self.tokens:
            words.append(heat.figures(_sums(self.nll, self.tokens, self.bytes)))
        if self.failed:
            words.append(f"{self.failed} failed")
        self._say(" · ".join(words))

    def _say(self, line: str) -> None:
        from genctl.render.parts import visible

        print(visible(line), file=sys.stderr, flush=True)

    def _say_failed(self, made: Mapping[str, Any]) -> None:
        self._say(f"error: text {made['id']}: {made['error']['message']}")


def _figures(one: Scored) -> Figures:
    return _sums(one.nll, one.count, one.bytes)


def _sums(nll: float, tokens: int, bytes: int) -> Figures:
    from genctl.render.heat import Figures
    from genctl.scoring.scorer import perplexity

    bits = nll / math.log(2)
    return Figures(nll, bits, perplexity(nll, tokens), bits / bytes if bytes else math.nan, tokens)

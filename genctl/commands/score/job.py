"""`genctl score`: read texts, score, write and show them, coloured by the probabilities of their tokens."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from genctl.commands.engine_choice import engine_of
from genctl.commands.job import WIDTH, Row, settle, started, usable
from genctl.commands.options import shown_top
from genctl.commands.score.options import ScoreOptions
from genctl.engines.protocol import Detail, Scored, ScoringOptions, TextToScore, trained_length_note
from genctl.errors import GenctlError, InputError, UsageError, count
from genctl.events import Token
from genctl.io import jsonl, writers
from genctl.io.record_output import RecordOutput
from genctl.io.records import SCHEMA, finite, token_entry
from genctl.io.rows import BadRow, InputRow
from genctl.terminal import theme, widgets
from genctl.terminal.console import make_consoles
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.live_region import LoadingBar
from genctl.terminal.run_history import put, put_words
from genctl.terminal.standard_streams import is_terminal
from genctl.terminal.text_width import MarkedPiece, hanging, marked, one_line

SORTED = 4  # batches that are sorted by length at a time
BY = {"mean": "mean log-probability", "total": "total log-probability", "bits-per-byte": "bits per byte"}


def score(options: ScoreOptions) -> int | None:
    """Run `genctl score`."""
    with started(options, engine_of(options), row="text") as job:
        view = ScoreView(options)
        _check_utf8(options)
        layers, early = job.early_settings()
        flags = any("row_timeout" in layer.values for layer in layers if layer.declared == "command")
        if flags and early.runtime.backend is None:
            raise UsageError(
                "--row-timeout is for requests to a server, and there is no --backend: a checkpoint here reads several "
                "texts in one pass"
            )
        rows = job.read(shape=jsonl.SCORED_ROW)
        if rows is None:
            return None
        view.headed = not (job.single_prompt or options.rank)
        job.shown = job.live = view.shown
        with job.outputs() as stack:
            writer: writers.Writer = writers.Unclosed()
            if not view.shown:
                sink = job.sink(stack, options.output)
                on_error = job.messages.failure
                writer = writers.open_writer(options.format, sink, on_error=on_error, formats=writers.SCORE_FORMATS)
            output = job.output = RecordOutput(writer)

            used, unset = early.runtime, {"prompt_cache": None, "compile": False, "row_timeout": None}
            for name, value in unset.items() if used.backend is None else ():
                if getattr(used, name) != value:  # set in a settings file
                    why = "is not used: genctl score reads every text as a whole"
                    job.messages.note(f"{name} ({early.origins[name]}) {why}")
                    used = replace(used, **{name: value})  # type: ignore[arg-type]  # each has its own type
            with closing(LoadingBar(view.err, time.monotonic)) as bar:
                engine = job.load_engine(
                    replace(early, runtime=used),
                    on_event=None if options.quiet else bar.show,
                    need_tokenizer=False,
                    live=view.shown,
                )
            if early.runtime.backend is not None:
                settle(engine, layers)
            width = engine.width(early, 1 if view.shown or job.single_prompt else WIDTH)
            texts = usable(_candidates(rows, job.interrupt, options), partial(_text_of, options), job.fail)
            how = ScoringOptions(
                add_eos=options.add_eos,
                stride=options.stride,
                window=options.window,
                by=options.by or "mean",
                batch_size=width,
                chunk=width if view.shown else SORTED * width,
                detail=Detail(view.details or options.report is not None, view.top),
                captions=view.shown or view.details or bool(options.report),
                context=options.context,
                target=options.target,
                rank=options.rank,
                row_timeout=early.runtime.row_timeout,
            )
            outcomes = engine.score(texts, how, interrupted=job.interrupt)
            job.messages.detail(*engine.notes())

            job.interrupt.gentle = True
            model, trained = engine.about.name, engine.about.trained
            for row, outcome in outcomes:
                if isinstance(outcome, GenctlError):
                    job.fail(row, outcome.code, outcome.message)
                    continue
                view.show(row, outcome)
                if trained is not None and any(one.length > trained for one in outcome):
                    job.messages.note_once(trained_length_note(trained), job.row_label(row))
                if (page := job.page) is not None:
                    context = row.extra.get("context", options.context)
                    for one in outcome:
                        prompt = (context or (row.prompt if one.text != row.prompt else "") or "") + one.lead
                        name = row.id if one.rank is None else f"{row.id} rank {one.rank}"
                        words, input = figures(one), row.columns or None
                        page.scored(name, prompt, one.tokens, model=model, figures=words, input=input)
                output.put(row.index, [_record(row, one, model, options, tokens=view.details) for one in outcome])
            job.messages.detail(*engine.done.findings)
            output.close(cut_short=bool(job.interrupt.status))
        view.sum_up(job.failed, job.messages.print)
        return job.status()


def _check_utf8(options: ScoreOptions) -> None:
    """Raises UsageError for a flag that is not valid UTF-8."""
    for name in ("context", "target"):
        try:
            (getattr(options, name) or "").encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"--{name}: not UTF-8 at character {error.start + 1}") from None


def _candidates(rows: Iterator[Row], interrupt: Interrupt, options: ScoreOptions) -> Iterator[Row]:
    """The rows; with --rank and without rows of a file, one row that has all texts as candidates."""
    rows = _until_signal(rows, interrupt)
    if not options.rank or options.has_rows:
        yield from rows
        return
    candidates: list[str] = []
    for row in rows:
        if isinstance(row, BadRow):
            raise InputError(row.message)
        candidates.append(row.prompt or "")
    if candidates:
        yield InputRow("0", 0, extra={"candidates": tuple(candidates)}, where="the candidates")


def _until_signal(rows: Iterator[Row], interrupt: Interrupt) -> Iterator[Row]:
    """The rows until a signal: waiting for input ends at once, and texts that were read are still scored."""
    while True:
        interrupt.gentle = False
        try:
            row = next(rows, None)
        except SystemExit:
            return
        finally:
            interrupt.gentle = True
        if row is None:
            return
        yield row


def _text_of(options: ScoreOptions, row: InputRow) -> TextToScore:
    """The text to score for a row: its own fields, else the flags. Raises InputError if they contradict each other."""
    candidates = row.extra.get("candidates", ())
    context = row.extra.get("context", options.context)
    target = row.extra.get("target", options.target)
    if options.rank and not candidates:
        raise InputError(f"{row.where}: --rank sorts candidates, and the row has none")
    if candidates and target is not None:
        raise InputError(f"{row.where}: the row has candidates, and --target is something else to score")
    return TextToScore(row.prompt or "", context, target, tuple(candidates))


def _record(row: InputRow, result: Scored, model: str, options: ScoreOptions, *, tokens: bool) -> dict[str, Any]:
    """The record of a text. `nll` is in nats, summed over the scored tokens: the last `tokens` of `token_ids`."""
    named = {name: row.extra.get(name, getattr(options, name)) for name in ("context", "target")}
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
        "model": model,
        **extra,
    }
    if tokens:
        fields["scores"] = [token_entry(token) for token in result.tokens]
    record: dict[str, Any] = finite(fields)
    return record


class ScoreView:
    """The output for people: heat maps, rankings and tables of tokens, and the sum over all texts."""

    def __init__(self, options: ScoreOptions) -> None:
        self.options = options
        self.out, self.err = make_consoles(options.color)
        self.shown = options.on_screen
        self.details = options.scores or options.top_logprobs is not None
        self.top = shown_top(options)
        self.headed = False  # whether each text has a heading
        self._texts = self._tokens = self._bytes = 0
        self._nll = 0.0
        self._mapped = False  # whether a heat map was shown

    def show(self, row: InputRow, outcome: Sequence[Scored]) -> None:
        """Count a row, and show it: on a terminal, or with --scores on standard error beside piped results."""
        for one in outcome:
            self._texts += 1
            self._nll += one.nll
            self._tokens += one.count
            self._bytes += one.bytes
        if not self.shown and not (self.details and self.options.format == "text"):
            return
        console = self.out if self.shown else self.err
        width, ranked = console.width, outcome[0].rank is not None
        lines = []
        if self.headed:
            lines.append(widgets.header(width, f"text {row.name}", row.prompt or ""))
        if ranked and self.shown:
            lines += ranking(outcome, BY[self.options.by or "mean"], width)
        for one in outcome:
            if ranked and self.details:
                lines.append(widgets.header(width, f"rank {one.rank}", one.text))
            if self.shown and not ranked:
                context = row.prompt if one.text != row.prompt else row.extra.get("context", self.options.context)
                lines += heat(context or "", one.lead, one.tokens, width)
                self._mapped = True
            if self.details:
                lines += token_table(one.tokens, width, self.top)
        for line in lines:
            console.print(line)
        if self.shown and not ranked:
            put(console, Text(figures(outcome[0])))

    def sum_up(self, failed: int, print_line: Callable[[str], object]) -> None:
        """Print the legend, and the sum of several texts."""
        if self.options.quiet:
            return
        if self._mapped:
            put_words(self.out, legend())
        wanted = self.options.verbose or self.shown or is_terminal(sys.stderr)
        if not wanted or self.options.rank or self._texts + failed < (1 if self.options.verbose else 2):
            return
        words = [count(self._texts, "text")]
        if self._tokens:
            words.append(figures(Scored("", (), self._nll, self._tokens, self._bytes, ())))
        if failed:
            words.append(f"{failed} failed")
        print_line(" · ".join(words))


CONTEXT = 3  # lines of context shown before the text
NARROW = 72  # cells below which a ranking has fewer columns
COLUMNS = {"rank": 4, "mean": 9, "total": 10, "perplexity": 10, "bits/byte": 9, "tokens": 6}  # their widths in cells


def heat(context: str, lead: str, tokens: Sequence[Token], width: int) -> list[Text]:
    """The text in lines of at most `width` cells, under each a line of digits: the tenths of each token's probability.

    A digit stands under the first letter of its token. Tokens that share a character count as one, with the product of
    their probabilities. `context` and `lead` have no score; they come first, dimmed and without digits.
    """
    return marked(width, context + lead, _groups(tokens), lines=CONTEXT)


def legend() -> Text:
    """The meaning of digits and colours, in one line of 70 cells."""
    line = Text(no_wrap=True).append("digits: tenths of each token's probability, ", style=theme.DIM)
    for digit in range(10):
        line.append(str(digit), style=theme.colour(digit / 10 + 0.05))
    line.append(" (9: 90% and up)", style=theme.DIM)
    return line


def figures(sums: Scored) -> str:
    """A text's sums in words."""
    words = [
        f"perplexity {widgets.perplexity(sums.ppl)}",
        f"{widgets.rounded(sums.nll)} nats",
        f"{widgets.rounded(sums.bits)} bits",
    ]
    if not math.isnan(sums.bpb):
        words.append(f"{sums.bpb:.3f} bits/byte")
    words.append(count(sums.count, "token"))
    return " · ".join(words)


def token_table(tokens: Sequence[Token], width: int, top: int) -> list[Text]:
    """Each scored token with its probability, log-probability, rank and entropy, and `top` alternatives."""
    lines = [widgets.score_heading(width)]
    for step, token in enumerate(tokens, 1):
        lines.append(widgets.score_line(step, token, width))
        lines += widgets.alternative_lines(token, width, top)
    return lines


def ranking(entries: Sequence[Scored], by: str, width: int) -> list[Text]:
    """Candidates, best first, in lines of at most `width` cells. `by` names the sort key in words."""
    left_out = () if width >= NARROW else ("perplexity", "bits/byte")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style=theme.DIM, expand=True)
    for name, size in COLUMNS.items():
        if name not in left_out:
            table.add_column(name, justify="right", width=size, no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
    for rank, sums in enumerate(entries, 1):
        cells: dict[str, Text | str] = {
            "rank": f"{rank}",
            "mean": Text(widgets.rounded(sums.mean), style=theme.colour(math.exp(min(sums.mean, 0.0)))),
            "total": widgets.rounded(-sums.nll),
            "perplexity": widgets.perplexity(sums.ppl),
            "bits/byte": "–" if math.isnan(sums.bpb) else f"{sums.bpb:.3f}",
            "tokens": f"{sums.count:,}",
        }
        shown = [cell for name, cell in cells.items() if name not in left_out]
        table.add_row(*shown, Text(one_line(sums.text)), style=theme.CHOSEN if rank == 1 else theme.PLAIN)
    words = f"sorted by {by}; log-probabilities in nats" + ("; no room for perplexity, bits/byte" if left_out else "")
    return widgets.lines_of(table, width) + hanging("", words, width, theme.DIM)


def _groups(tokens: Iterable[Token]) -> Iterable[MarkedPiece]:
    """The pieces of a text; tokens that share a character are one."""

    def piece(text: str, logprob: float) -> MarkedPiece:
        probability = math.exp(min(logprob, 0.0))
        return MarkedPiece(text, theme.colour(probability), str(min(int(probability * 10), 9)))

    logprob, ids = 0.0, list[int]()  # of tokens whose character is still incomplete
    for token in tokens:
        logprob += token.logprob
        ids.append(token.id)
        if token.text:
            yield piece(token.text, logprob)
            logprob, ids = 0.0, []
    if ids:
        yield piece("".join(widgets.token_text(id, "") for id in ids), logprob)

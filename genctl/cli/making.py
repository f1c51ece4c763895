"""A result becomes records, and a run gets its view: what a job shows and writes, apart from when."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from genctl.batch.records import record
from genctl.batch.rows import InputRow
from genctl.cli.asked import Asked
from genctl.cli.prompting import is_terminal
from genctl.cli.shortfall import listed
from genctl.results import Result

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.render.live import RunView
    from genctl.render.progress import RowsBar


def records_of(
    asked: Asked,
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


def shows(asked: Asked, *, live: bool) -> bool:
    """Whether anything is shown beside what is written: text as it comes, bars, details, trees, a summary."""
    details = asked.scores or asked.explain or asked.tree
    return live or details or not _is_quiet(asked, live=live)


def _is_quiet(asked: Asked, *, live: bool) -> bool:
    return asked.quiet or not (live or is_terminal(sys.stderr) or asked.verbose)


def make_view(asked: Asked, out: Console, err: Console, *, live: bool, top: int, several: bool) -> RunView:
    """What is shown. Where records are written instead, only the summary is, and what --scores asks for."""
    from genctl.render.console import discard
    from genctl.render.live import RunView

    details = asked.scores or asked.explain
    scores = asked.scores or (asked.top_logprobs or 0) > 0
    if live and asked.view == "beam":
        from genctl.render.beam import BeamView

        return BeamView(
            out,
            err,
            echo=asked.echo,
            scores=scores,
            top=top,
            explain=asked.explain,
            labels=several,
            quiet=asked.quiet,
            verbose=asked.verbose,
            tree=asked.tree,
            formula=not asked.quiet,
        )
    return RunView(
        out if live else err if details and asked.format == "text" else discard(),
        err,
        live=live,
        echo=asked.echo,
        scores=scores,
        top=top,
        explain=asked.explain,
        labels=several,
        quiet=_is_quiet(asked, live=live),
        verbose=asked.verbose,
    )


def wants_bar(asked: Asked, err: Console | None, *, live: bool) -> bool:
    """Whether a progress bar has a place of its own: nothing else is written to the terminal it would be on."""
    alone = asked.to_file or not is_terminal(sys.stdout)
    details = asked.format == "text" and (asked.scores or asked.explain)
    return err is not None and err.is_interactive and alone and not (live or asked.quiet or details)


def make_bar(err: Console, total: int | None, done: int) -> RowsBar:
    """The bar for so many rows, of which some are done."""
    from genctl.render.progress import RowsBar

    return RowsBar(err, total, done=done)

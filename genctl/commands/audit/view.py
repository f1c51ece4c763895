"""What an audit looks like: the verdict, a line for each hypothesis, and the worst row before and after.

On a terminal, in records, and on the page of `--report`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from rich.text import Text

from genctl.commands.parity.findings import Finding
from genctl.commands.recording import PageFile
from genctl.errors import count, percent
from genctl.events import Token
from genctl.io import writers
from genctl.io.records import finding
from genctl.parity.audit_values import Audit, AuditPosition, TriedCause
from genctl.terminal import theme, widgets
from genctl.terminal.marked_text import Levels, marked
from genctl.terminal.text_width import hanging

SHOWN = 8  # hypotheses
WORST = 12  # positions on a page
BAR = 10  # cells
STYLES = {"same": theme.colour(1.0), "explained": theme.colour(0.5), "unexplained": theme.ERROR}
LEVELS = Levels(tuple(2.0**power for power in range(0, 9)))  # of differences: 1, 2, … 256 times noise
LEGEND = "digits: the difference in noise, 0 below 1, then doubling up to 9 from 256"
Piece = Callable[[int], str]


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2g}"


def _best(one: Audit) -> list[TriedCause]:
    """The hypotheses that are shown: those of the greatest likelihood, each cause once."""
    found: dict[tuple[str, ...], TriedCause] = {}
    for each in one.tried:
        found.setdefault(each.causes, each)
    return [*found.values()][:SHOWN]


def _by_row(one: Audit) -> dict[str, list[AuditPosition]]:
    """The positions of each row, the row that differs most first."""
    rows: dict[str, list[AuditPosition]] = {text.id: [] for text in one.texts}
    for position in one.positions:
        rows[position.id].append(position)
    return dict(sorted(rows.items(), key=lambda row: -max((min(each.ratio, 1e6) for each in row[1]), default=0.0)))


def _finding(one: Audit) -> Finding:
    details = [("change ", advice) for advice in dict.fromkeys(cause.advice for cause in one.causes)]
    if one.first is not None:
        details.append(("from   ", f"row {one.first[0]}, token {one.first[1] + 1} on"))
    if one.positions:
        size = f"typically {_number(one.ratio)} × rounding error ({_number(one.noise)} nats)"
        words = f"{count(len(one.positions), 'token')} of {count(len(one.texts), 'row')}, {size}"
        details.append(("size   ", f"{words}; up to {_number(one.allowed)} × counts as the same"))
    details += [("note: ", note) for note in one.notes]
    details += [("failed ", reason) for reason in one.failed.values()]
    return Finding(one.trace, one.reference, one.verdict, STYLES[one.verdict], one.reason, details)


def lines(one: Audit, piece: Piece, width: int | None) -> list[Text]:
    """All that is shown. Without a `width`, lines are not broken."""
    found = _finding(one).lines(width)
    for each in _best(one):
        line = Text(no_wrap=True).append_text(widgets.bar(max(each.explained, 0.0), BAR))
        line.append(f" {percent(max(each.explained, 0.0)):>7}  ").append(widgets.visible(each.words))
        found.append(widgets.fit(line, width))
    if width is None or one.verdict == "same" or not one.positions:
        return found
    id, own = next(iter(_by_row(one).items()))
    text = next(each for each in one.texts if each.id == id)
    found.append(Text(f"row {widgets.visible(text.name or text.id)} differs most", style=theme.DIM))
    for label, name in [("before", "ratio"), ("after", "ratio_after")][: 1 + (one.verdict == "explained")]:
        pieces = (LEVELS.piece(each.token, piece(each.token), getattr(each, name)) for each in own)
        found += [Text(label, style=theme.DIM), *marked(width, text.prompt, pieces)]
    return found + hanging("", LEGEND, width, theme.DIM)


# -- records -----------------------------------------------------------------------------------------------------------

COLUMNS = (
    "kind", "trace", "reference", "verdict", "causes", "explained", "rows", "rows_left", "positions", "ratio", "words",
    "log_likelihood", "reason",
)  # fmt: skip


def records(one: Audit, *, positions: bool, failed_check: str) -> Iterator[dict[str, Any]]:
    """The audit, a record of each hypothesis, and each position if `positions`."""
    names = {"trace": one.trace, "reference": one.reference}
    causes = [{**asdict(cause), "words": cause.sentence} for cause in one.causes]
    yield finding("audit", {
        **names,
        "verdict": one.verdict,
        "reason": one.reason,
        "causes": causes,
        "candidates": [asdict(each) for each in one.candidates],
        "explained": one.explained,
        "rows": len(one.texts),
        "rows_left": one.rows_left,
        "positions": len(one.positions),
        "first": None if one.first is None else {"id": one.first[0], "index": one.first[1]},
        "ratio": one.ratio,
        "noise": {"median": one.noise, "allowed": one.allowed},
        "failed_checks": [failed_check] if failed_check else [],
        "failed_rows": dict(one.failed),
        "notes": list(one.notes),
    })  # fmt: skip
    for each in one.tried:
        yield finding("hypothesis", names | asdict(each))
    for position in one.positions if positions else ():
        yield finding("position", names | asdict(position))


def flat(record: writers.Record) -> writers.Record:
    """The columns of --format tsv: causes by their keys."""
    keys = [one["key"] if isinstance(one, dict) else one for one in record.get("causes", ())]
    return {**record, "causes": " ".join(keys)}


# -- the page ----------------------------------------------------------------------------------------------------------


def add_to_page(page: PageFile, one: Audit, piece: Piece) -> None:
    """Add the findings, and each row as two runs of a comparison: as the reference reads it, and as the trace has it.

    The row that differs most comes first.
    """
    page.facts.append(_finding(one).fact())
    if tried := [f"{percent(max(each.explained, 0.0))} {each.words}" for each in _best(one)]:
        page.facts.append(("causes tried", "; ".join(tried)))
    worst = [
        f"row {each.id}, token {each.index + 1} “{widgets.token_text(each.token, piece(each.token))}”: written "
        f"{_number(each.number)}, reference {_number(each.reference)}, {_number(each.ratio)} times noise"
        for each in sorted(one.positions, key=lambda each: -each.ratio)[:WORST]
    ]
    if worst:
        page.facts.append(("worst positions", "; ".join(worst)))
    prompts = {text.id: text.prompt for text in one.texts}
    for id, own in _by_row(one).items():
        shown = [each for each in own if not math.isnan(each.number)]  # a page has no sign for a missing number
        figures = ""
        if own:
            figures = f"differs by up to {_number(max(each.ratio for each in own))} times noise"
        if left := len(own) - len(shown):
            figures += f"; {count(left, 'token')} without a number left out"
        for run, side in enumerate(("reference", "trace"), start=1):
            numbers = [each.number if side == "trace" else each.reference for each in shown]
            tokens = [Token(each.token, number, piece(each.token)) for each, number in zip(shown, numbers, strict=True)]
            page.scored(
                f"{side}/{quote(id, safe='')}/0", prompts[id], tokens, model=one.reference,
                figures=figures if side == "trace" else "", run=run,
            )  # fmt: skip

"""An audit on a terminal, in records and on a page: the verdict, and each hypothesis."""

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
from genctl.parity.causes import Audit, TriedCause
from genctl.terminal import theme, widgets

SHOWN = 8  # hypotheses that are shown
BAR = 10  # width of a bar in cells
STYLES = {"same": theme.colour(1.0), "explained": theme.colour(0.5), "unexplained": theme.ERROR}
COLUMNS = (
    "kind", "trace", "reference", "verdict", "causes", "explained", "rows", "rows_left", "positions", "ratio", "words",
    "log_likelihood", "reason",
)  # fmt: skip


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2g}"


def _best(one: Audit) -> list[TriedCause]:
    """The hypotheses to show: the likeliest, each cause once."""
    found: dict[tuple[str, ...], TriedCause] = {}
    for each in one.tried:
        found.setdefault(each.causes, each)
    return [*found.values()][:SHOWN]


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


def lines(one: Audit, width: int | None) -> list[Text]:
    """All lines of the audit. Without a `width`, lines are not broken."""
    found = _finding(one).lines(width)
    for each in _best(one):
        line = Text(no_wrap=True).append_text(widgets.bar(max(each.explained, 0.0), BAR))
        line.append(f" {percent(max(each.explained, 0.0)):>7}  ").append(widgets.visible(each.words))
        found.append(widgets.fit(line, width))
    return found


def records(one: Audit, *, positions: bool, failed_check: str) -> Iterator[dict[str, Any]]:
    """A record of the audit, one of each hypothesis, and with `positions` one of each position."""
    names = {"trace": one.trace, "reference": one.reference}
    yield finding("audit", {
        **names,
        "verdict": one.verdict,
        "reason": one.reason,
        "causes": [{**asdict(cause), "words": cause.sentence} for cause in one.causes],
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
    """The columns of --format tsv, with causes as keys."""
    keys = [one["key"] if isinstance(one, dict) else one for one in record.get("causes", ())]
    return {**record, "causes": " ".join(keys)}


def add_to_page(page: PageFile, one: Audit, piece: Callable[[int], str]) -> None:
    """Add the findings, and each row as two runs of a comparison: as read by the reference, and as logged in the trace.

    The row that differs most comes first. A page has no sign for a missing number: such tokens are left out.
    """
    page.facts.append(_finding(one).fact())
    if tried := [f"{percent(max(each.explained, 0.0))} {each.words}" for each in _best(one)]:
        page.facts.append(("causes tried", "; ".join(tried)))
    rows = {text.id: [each for each in one.positions if each.id == text.id] for text in one.texts}
    largest = {id: max((min(each.ratio, 1e6) for each in own), default=0.0) for id, own in rows.items()}
    prompts = {text.id: text.prompt for text in one.texts}
    for id in sorted(rows, key=lambda id: -largest[id]):
        shown = [each for each in rows[id] if not math.isnan(each.number)]
        figures = f"differs by up to {_number(largest[id])} times noise" if rows[id] else ""
        if left := len(rows[id]) - len(shown):
            figures += f"; {count(left, 'token')} without a number left out"
        for run, side in enumerate(("reference", "trace"), start=1):
            numbers = [each.number if side == "trace" else each.reference for each in shown]
            tokens = [Token(each.token, number, piece(each.token)) for each, number in zip(shown, numbers, strict=True)]
            page.scored(
                f"{side}/{quote(id, safe='')}/0", prompts[id], tokens, model=one.reference,
                figures=figures if side == "trace" else "", run=run,
            )  # fmt: skip

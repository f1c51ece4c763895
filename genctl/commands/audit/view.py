"""What an audit looks like: the verdict, a line for each hypothesis, and the worst row before and after.

On a terminal, in records, and on the page of `--report`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from genctl.commands.page_file import FileAtEnd, ReportOutput, plain_page
from genctl.errors import count, percent
from genctl.io import writers
from genctl.io.records import finding
from genctl.parity.audit_values import Audit, AuditPosition, TriedCause
from genctl.terminal import theme, widgets
from genctl.terminal.live_region import LiveRegion
from genctl.terminal.marked_text import Levels, MarkedPiece, marked
from genctl.terminal.text_width import hanging, labelled

SHOWN = 8  # hypotheses
BAR = 10  # cells
PLAIN_WIDTH = 80
_STYLES = {"same": theme.colour(1.0), "explained": theme.colour(0.5), "unexplained": theme.ERROR}
LEVELS = Levels(tuple(2.0**power for power in range(0, 9)))  # of differences: 1, 2, … 256 times noise
Piece = Callable[[int], str]


def lines(one: Audit, piece: Piece, width: int | None) -> list[Text]:
    """All that is shown. Without a `width`, lines are not broken."""
    heading = f"{widgets.visible(one.trace)} against {widgets.visible(one.reference)}"
    room = PLAIN_WIDTH if width is None else width
    found = [widgets.header(max(room, cell_len(heading) + 6) if width is None else room, heading)]
    style = _STYLES[one.verdict] + theme.CHOSEN
    found += labelled(f"{one.verdict}: ", style, widgets.visible(one.reason), width)
    for advice in dict.fromkeys(cause.advice for cause in one.causes):
        found += hanging("change ", widgets.visible(advice), width)
    if one.first is not None:
        found += hanging("from   ", widgets.visible(f"row {one.first[0]}, token {one.first[1] + 1} on"), width)
    rows = len(one.texts)
    what = (
        f"{count(len(one.positions), 'token')} of {count(rows, 'row')}, typically {_number(one.ratio)} times rounding"
    )
    if one.positions:
        what += f" ({_number(one.noise)} nats); up to {_number(one.allowed)} is the same"
        found += hanging("size   ", what, width)
    for note in one.notes:
        found += hanging("note: ", widgets.visible(note), width)
    for reason in one.failed.values():
        found += hanging("failed ", widgets.visible(reason), width)
    found += _tried(one, width)
    found += strip(one, piece, width)
    return found


def _tried(one: Audit, width: int | None) -> list[Text]:
    found = []
    for each in best(one):
        line = Text(no_wrap=True).append_text(widgets.bar(max(each.explained, 0.0), BAR))
        line.append(f" {percent(max(each.explained, 0.0)):>7}  ").append(widgets.visible(each.words))
        found.append(widgets.fit(line, width))
    return found


def best(one: Audit) -> list[TriedCause]:
    """The hypotheses that are shown: those of the greatest likelihood, each cause once."""
    found: dict[tuple[str, ...], TriedCause] = {}
    for each in one.tried:
        found.setdefault(each.causes, each)
    return [*found.values()][:SHOWN]


def worst_row(one: Audit) -> list[AuditPosition]:
    """The positions of the row that differs most."""
    if one.verdict == "same" or not one.positions:
        return []
    id = max(one.positions, key=lambda each: min(each.ratio, 1e6)).id
    return [each for each in one.positions if each.id == id]


def strips(one: Audit) -> list[tuple[str, str]]:
    """The views of the worst row, and the field of a position that each shows."""
    before = [("before", "ratio")] if worst_row(one) else []
    return before + ([("after", "ratio_after")] if one.verdict == "explained" else [])


def strip(one: Audit, piece: Piece, width: int | None) -> list[Text]:
    """The worst row, each token with its difference as a digit: before, and after the explanation."""
    own = worst_row(one)
    if not own or width is None:
        return []
    text = next(each for each in one.texts if each.id == own[0].id)
    found = [Text(f"row {widgets.visible(text.name or text.id)} differs most", style=theme.DIM)]
    for label, name in strips(one):
        sizes = [(piece(each.token) or f"‹id {each.token}›", getattr(each, name)) for each in own]
        pieces = (MarkedPiece(token, LEVELS.colour(size), LEVELS.digit(size)) for token, size in sizes)
        found += [Text(label, style=theme.DIM), *marked(width, text.prompt, pieces)]
    words = "digits: the difference in noise, 0 below 1, then doubling up to 9 from 256"
    return found + hanging("", words, width, theme.DIM)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2g}"


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


class AuditTsvWriter(writers.TsvWriter):
    """One line for the audit and each hypothesis."""

    def write(self, record: writers.Record) -> None:
        keys = [one["key"] if isinstance(one, dict) else one for one in record.get("causes", ())]
        super().write({**record, "causes": " ".join(keys)})


class AuditOutput(ReportOutput):
    """Writes an audit."""

    def __init__(self, format: str, console: Console, sink: writers.Sink | None, *, positions: bool) -> None:
        super().__init__(format, console, sink, lambda sink: AuditTsvWriter(sink, COLUMNS))
        self._positions = positions
        self._found: tuple[Audit, Piece] | None = None

    def take(self, one: Audit, piece: Piece, failed_check: str) -> None:
        """The audit is done. `failed_check`: why the exit status is 4."""
        self._found = one, piece
        self.records(records(one, positions=self._positions, failed_check=failed_check))

    def lines(self, width: int | None) -> list[Text]:
        """What is found, in lines of at most `width` cells."""
        return [] if self._found is None else lines(*self._found, width)


# -- the page ----------------------------------------------------------------------------------------------------------

MOST = 60  # hypotheses
LONGEST = 2000  # tokens of a row


class AuditPage(FileAtEnd):
    """The page in the making."""

    def take(self, one: Audit, piece: Piece, facts: Sequence[tuple[str, str]]) -> None:
        """The audit is done."""
        self._found, self._piece, self._facts = one, piece, facts

    def content(self) -> bytes:
        """The page in UTF-8. Every text in it is escaped by the template."""
        one = self._found
        facts = [
            ("trace", one.trace), ("reference", one.reference), ("rows", f"{len(one.texts):,}"),
            ("tokens", f"{len(one.positions):,}"), *self._facts,
        ]  # fmt: skip
        return plain_page(
            "audit.html.jinja",
            f"Audit of {widgets.visible(one.trace)}",
            facts,
            verdict=one.verdict,
            reason=widgets.visible(one.reason),
            remarks=[*map(widgets.visible, (*(each.advice for each in one.causes), *one.notes, *one.failed.values()))],
            tried=[
                {
                    "words": widgets.visible(each.words), "percent": percent(max(each.explained, 0.0)),
                    "share": f"{100 * min(max(each.explained, 0.0), 1.0):.1f}",
                    "likelihood": f"{each.log_likelihood:.1f}", "ratio": f"{each.ratio:.3g}",
                }
                for each in one.tried[:MOST]
            ],
            strips=[self._strip(label, name) for label, name in strips(one)],
        )  # fmt: skip

    def _strip(self, label: str, name: str) -> dict[str, Any]:
        pieces = []
        for each in worst_row(self._found)[:LONGEST]:
            ratio = getattr(each, name)
            about = f"token {each.index + 1}: {ratio:.3g} times noise"
            text = self._piece(each.token) or f"‹id {each.token}›"
            pieces.append({"text": widgets.visible(text), "level": LEVELS.digit(ratio), "about": about})
        return {"name": f"The row that differs most, {label}", "pieces": pieces}


# -- while it is done --------------------------------------------------------------------------------------------------

_STAGES = {
    "asking": "the server is asked",
    "reading": "the reference reads",
    "hypotheses": "causes are tried",
    "pairs": "pairs of causes are tried",
}


class LiveAudit:
    """One line on what is done. `clock` gives seconds."""

    def __init__(self, console: Console, clock: Callable[[], float], *, quiet: bool) -> None:
        self._console = console
        self._draws = console.is_interactive and not quiet
        self._region = LiveRegion(console, clock)

    def stage(self, stage: str) -> None:
        """What begins now."""
        if self._draws:
            line = Text(f"audit: {_STAGES.get(stage, stage)}", style=theme.DIM)
            self._region.draw([widgets.fit(line, self._console.width)])

    def hide(self) -> None:
        """Erase what is drawn."""
        self._region.hide()

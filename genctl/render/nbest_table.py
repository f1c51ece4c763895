"""The n-best table: every sequence that a search finished, best first, and whether it was returned."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from genctl.events import Hypothesis
from genctl.history import LaneHistory
from genctl.render import theme, widgets
from genctl.render.beam_picture import by_score, excerpt, lead
from genctl.render.score_formula import number
from genctl.render.text_width import first_cells, one_line

ROWS = 20  # shown besides those that the search keeps
TEXT = 24  # cells that the text has at least, where less important columns can make room
LEAST_FIRST = ("logprob", "total", "tokens", "ended")
RETURNED, KEPT, PUSHED_OUT = "★", " ", "✗"
GROUPED = frozenset({"diverse-beam", "constrained-beam"})  # what they keep does not follow from the scores alone


@dataclass(frozen=True)
class RankedSequence:
    """A finished sequence and its mark."""

    hypothesis: Hypothesis
    text: str
    mark: str


def ranking(lane: LaneHistory, beams: int) -> list[RankedSequence]:
    """The finished sequences of a lane: the returned ones in their order, then the others by score.

    `beams` is how many finished sequences the search keeps: better ones pushed the others out.
    """
    ended = by_score(lane.endings or ())
    entries = []
    for hypothesis in lane.finished.hypotheses if lane.finished else ():
        match = next((path for path in ended if _same(path.hypothesis, hypothesis)), None)
        if match is not None:
            ended.remove(match)
        text = hypothesis.text or (match.text() if match else "")
        entries.append(RankedSequence(hypothesis, text, RETURNED))
    grouped = lane.began is not None and lane.began.strategy in GROUPED
    for path in ended:
        mark = KEPT if grouped or len(entries) < beams else PUSHED_OUT
        entries.append(RankedSequence(path.hypothesis, path.hypothesis.text or path.text(), mark))
    return entries


def _same(one: Hypothesis, other: Hypothesis) -> bool:
    return one.tokens == other.tokens and one.slot == other.slot


def table(lane: LaneHistory, beams: int, width: int) -> list[Text]:
    """The n-best table in lines of at most `width` cells; [] if nothing finished."""
    entries = ranking(lane, beams)
    if not entries:
        return []
    shown = entries[: max(beams, sum(entry.mark == RETURNED for entry in entries)) + ROWS]
    columns = _columns(shown)
    left_out = []
    for name in LEAST_FIRST:
        if width - _cells(columns) >= TEXT:
            break
        if name in columns:
            left_out.append(name)
            del columns[name]
    room = max(width - _cells(columns), 8)
    lines = [Text("  " + "".join(column[0] for column in columns.values()) + " text", style=theme.DIM)]
    skip = lead([entry.text for entry in shown if cell_len(one_line(entry.text)) > room])
    for place, entry in enumerate(shown, start=1):
        line = Text(f"{entry.mark} " + "".join(column[place] for column in columns.values()) + " ")
        line.append(excerpt(entry.text, skip, room))
        line.stylize(theme.CHOSEN if entry.mark == RETURNED else theme.DIM if entry.mark == PUSHED_OUT else theme.PLAIN)
        lines.append(line)
    if len(entries) > len(shown):
        lines.append(Text(f"  … and {len(entries) - len(shown)} more", style=theme.DIM))
    lines.append(Text(_legend(entries, left_out), style=theme.DIM))
    return [widgets.fit(line, width) for line in lines]


def _columns(entries: list[RankedSequence]) -> dict[str, list[str]]:
    """The columns before the text by name: head, then a cell for each entry."""
    rows = [entry.hypothesis for entry in entries]
    ends = list(map(_why, rows))
    column = max(len(why) for why in [*ends, "ended"])
    columns = {"rank": [f"{'rank':>4} ", *(f"{place:>4} " for place in range(1, len(rows) + 1))]}
    for name in ("score", "total", "logprob"):
        columns[name] = [f"{name:>9} ", *(f"{number(getattr(row, name)):>9} " for row in rows)]
    columns["tokens"] = [f"{'tokens':>6} ", *(f"{len(row.tokens):>6} " for row in rows)]
    columns["ended"] = [f" {'ended':<{column}} ", *(f" {why:<{column}} " for why in ends)]
    return columns


def _cells(columns: dict[str, list[str]]) -> int:
    """What is taken before the text, the mark included."""
    return 3 + sum(len(column[0]) for column in columns.values())


def _why(hypothesis: Hypothesis) -> str:
    return f"{hypothesis.reason} “{first_cells(hypothesis.cause, 12)}”" if hypothesis.cause else hypothesis.reason


def _legend(entries: list[RankedSequence], left_out: list[str]) -> str:
    words = [f"{RETURNED} returned"]
    if any(entry.mark == PUSHED_OUT for entry in entries):
        words.append(f"{PUSHED_OUT} pushed out by better ones")
    if left_out:
        words.append(f"no room for {', '.join(left_out)}")
    return " · ".join(words)

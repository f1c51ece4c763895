"""The n-best table: every sequence that a search finished, best first, and whether it was returned."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from genctl.events import Hypothesis
from genctl.render import theme, widgets
from genctl.render.beam_picture import by_score, excerpt, lead
from genctl.render.run_history import LaneHistory
from genctl.render.score_formula import number
from genctl.render.text_width import first_cells, one_line

ROWS = 20  # shown besides those that the search keeps
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
    leaves = by_score(lane.endings or ())
    entries = []
    for hypothesis in lane.finished.hypotheses if lane.finished else ():
        match = next((leaf for leaf in leaves if _same(leaf.hypothesis, hypothesis)), None)
        if match is not None:
            leaves.remove(match)
        text = hypothesis.text or (match.path.text() if match else "")
        entries.append(RankedSequence(hypothesis, text, RETURNED))
    grouped = lane.began is not None and lane.began.strategy in GROUPED
    for leaf in leaves:
        mark = KEPT if grouped or len(entries) < beams else PUSHED_OUT
        entries.append(RankedSequence(leaf.hypothesis, leaf.hypothesis.text or leaf.path.text(), mark))
    return entries


def _same(one: Hypothesis, other: Hypothesis) -> bool:
    return one.tokens == other.tokens and one.slot == other.slot


def table(lane: LaneHistory, beams: int, width: int) -> list[Text]:
    """The n-best table in lines of at most `width` cells; [] if nothing finished."""
    entries = ranking(lane, beams)
    if not entries:
        return []
    shown = entries[: max(beams, sum(entry.mark == RETURNED for entry in entries)) + ROWS]
    ends = [_why(entry.hypothesis) for entry in shown]
    column = max(len(why) for why in [*ends, "ended"])
    lines = [Text(f"  {'rank':>4} {'score':>9} {'total':>9} {'logprob':>9} {'tokens':>6}  {'ended':<{column}}  text")]
    lines[0].stylize(theme.DIM)
    room = max(width - lines[0].cell_len + len("text"), 8)
    skip = lead([entry.text for entry in shown if cell_len(one_line(entry.text)) > room])
    for place, (entry, why) in enumerate(zip(shown, ends, strict=True), start=1):
        hypothesis = entry.hypothesis
        numbers = (hypothesis.score, hypothesis.total, hypothesis.logprob)
        line = Text(f"{entry.mark} {place:>4} " + " ".join(f"{number(value):>9}" for value in numbers))
        line.append(f" {len(hypothesis.tokens):>6}  {why:<{column}}  ")
        line.append(excerpt(entry.text, skip, room))
        line.stylize(theme.CHOSEN if entry.mark == RETURNED else theme.DIM if entry.mark == PUSHED_OUT else theme.PLAIN)
        lines.append(line)
    if len(entries) > len(shown):
        lines.append(Text(f"  … and {len(entries) - len(shown)} more", style=theme.DIM))
    lines.append(Text(_legend(entries), style=theme.DIM))
    return [widgets.fit(line, width) for line in lines]


def _why(hypothesis: Hypothesis) -> str:
    return f"{hypothesis.reason} “{first_cells(hypothesis.cause, 12)}”" if hypothesis.cause else hypothesis.reason


def _legend(entries: list[RankedSequence]) -> str:
    words = [f"{RETURNED} returned"]
    if any(entry.mark == PUSHED_OUT for entry in entries):
        words.append(f"{PUSHED_OUT} pushed out by better ones")
    return " · ".join(words)

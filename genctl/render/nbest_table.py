"""The n-best table: every sequence that a search finished, best first, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from genctl.events import Hypothesis
from genctl.render import theme
from genctl.render.formula import number
from genctl.render.lanes import by_score, excerpt, lead
from genctl.render.lines import first_cells, one_line
from genctl.render.story import LaneStory

ROWS = 20  # beyond those that were kept
RETURNED, KEPT, PUSHED_OUT = "★", " ", "✗"
GROUPED = frozenset({"diverse-beam", "constrained-beam"})  # what they keep does not follow from the scores alone


@dataclass(frozen=True)
class RankedSequence:
    """A finished sequence and its mark."""

    hypothesis: Hypothesis
    text: str
    mark: str


def ranking(lane: LaneStory, kept: int) -> list[RankedSequence]:
    """What a lane finished: the returned sequences as they are returned, then the others by score.

    `kept` is how many the search keeps at a time: the others were pushed out by better ones.
    """
    leaves = by_score(lane.endings or ())
    entries = []
    for hypothesis in lane.finished.hypotheses if lane.finished else ():
        found = next((leaf for leaf in leaves if _same(leaf.hypothesis, hypothesis)), None)
        if found is not None:
            leaves.remove(found)
        text = hypothesis.text or (found.path.text() if found else "")
        entries.append(RankedSequence(hypothesis, text, RETURNED))
    grouped = lane.began is not None and lane.began.strategy in GROUPED
    for leaf in leaves:
        mark = KEPT if grouped or len(entries) < kept else PUSHED_OUT
        entries.append(RankedSequence(leaf.hypothesis, leaf.hypothesis.text or leaf.path.text(), mark))
    return entries


def _same(one: Hypothesis, other: Hypothesis) -> bool:
    return one.tokens == other.tokens and one.slot == other.slot


def table(lane: LaneStory, kept: int, width: int) -> list[Text]:
    """The n-best table, lines of at most `width` cells. Nothing where nothing was finished."""
    entries = ranking(lane, kept)
    if not entries:
        return []
    shown = entries[: max(kept, sum(entry.mark == RETURNED for entry in entries)) + ROWS]
    ends = [_why(entry.hypothesis) for entry in shown]
    column = max(len(why) for why in [*ends, "ended"])
    lines = [Text(f"  {'rank':>4} {'score':>9} {'total':>9} {'logprob':>9} {'tokens':>6}  {'ended':<{column}}  text")]
    lines[0].stylize(theme.DIM)
    room = max(width - lines[0].cell_len + len("text"), 8)
    skip = lead([entry.text for entry in shown if cell_len(one_line(entry.text)) > room])
    for place, (entry, why) in enumerate(zip(shown, ends, strict=True), start=1):
        one = entry.hypothesis
        line = Text(f"{entry.mark} {place:>4} {number(one.score):>9} {number(one.total):>9} {number(one.logprob):>9}")
        line.append(f" {len(one.tokens):>6}  {why:<{column}}  ")
        line.append(excerpt(entry.text, skip, room))
        line.stylize(theme.CHOSEN if entry.mark == RETURNED else theme.DIM if entry.mark == PUSHED_OUT else theme.PLAIN)
        lines.append(line)
    if len(entries) > len(shown):
        lines.append(Text(f"  … and {len(entries) - len(shown)} more", style=theme.DIM))
    lines.append(Text(_legend(entries), style=theme.DIM))
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines


def _why(one: Hypothesis) -> str:
    return f"{one.reason} “{first_cells(one.cause, 12)}”" if one.cause else one.reason


def _legend(entries: list[RankedSequence]) -> str:
    words = [f"{RETURNED} returned"]
    if any(entry.mark == PUSHED_OUT for entry in entries):
        words.append(f"{PUSHED_OUT} pushed out by better ones")
    return " · ".join(words)

"""The n-best table: every sequence that a search finished or a choice had, best first, and whether it was returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from genctl.commands.run.beam_picture import by_score
from genctl.events import Hypothesis
from genctl.events.history import LaneHistory, Path
from genctl.terminal import departures, theme, widgets
from genctl.terminal.score_formula import number, penalty_of
from genctl.terminal.summary import DOT
from genctl.terminal.summary import lines as lines_of_items
from genctl.terminal.text_width import first_cells

ROWS = 20  # shown besides those that the search keeps
TEXT = 24  # cells that the text has at least, where less important columns can make room
LEAST_FIRST = ("logprob", "total", "tokens", "ended")
RETURNED, KEPT, PUSHED_OUT = "★", " ", "✗"
GROUPED = frozenset({"diverse-beam", "constrained-beam"})  # what they keep does not follow from the scores alone


@dataclass(frozen=True)
class RankedSequence:
    """A finished sequence and its mark."""

    hypothesis: Hypothesis
    path: Path | None
    mark: str

    @property
    def text(self) -> str:
        """Its text, which takes as long as it is."""
        return self.hypothesis.text or (self.path.text() if self.path else "")


def ranking(lane: LaneHistory, beams: int) -> list[RankedSequence]:
    """The finished sequences of a lane: the returned ones in their order, then the others by score.

    `beams` is how many finished sequences the search keeps: better ones pushed the others out.
    """
    ended = by_score(lane.endings or ())
    entries = []
    returned = lane.finished.hypotheses if lane.finished else ()
    paths = lane.paths_of(returned)
    entries += [RankedSequence(one, path, RETURNED) for one, path in zip(returned, paths, strict=True)]
    if lane.finished and lane.finished.others:
        return entries + [RankedSequence(one, None, PUSHED_OUT) for one in lane.finished.others]
    matched = set(filter(None, paths))
    ended = [path for path in ended if path not in matched]
    grouped = lane.began is not None and lane.began.strategy in GROUPED
    for path in ended:
        mark = KEPT if grouped or len(entries) < beams else PUSHED_OUT
        entries.append(RankedSequence(path.hypothesis, path, mark))
    return entries


def table(lane: LaneHistory, beams: int, width: int) -> list[Text]:
    """The n-best table in lines of at most `width` cells; [] if nothing finished.

    Each text begins where it leaves the one that it is nearest to.
    """
    entries = ranking(lane, beams)
    if not entries:
        return []
    shown = entries[: max(beams, sum(entry.mark == RETURNED for entry in entries)) + ROWS]
    chosen = lane.finished is not None and bool(lane.finished.others)
    columns = _columns(shown, without=("total",) if chosen else ())
    ids = [entry.hypothesis.tokens for entry in shown]
    texts = [entry.text for entry in shown]
    found = departures.departures(texts, ids)
    shared = departures.column(found)
    taken = 3 + (len(shared[0]) if shared else 0)  # the mark, and what is shared
    least = max(part.cell_len for part in departures.parts(texts, found, TEXT))
    left_out = []
    for name in LEAST_FIRST:
        if width - taken - _cells(columns) >= least:
            break
        if name in columns:
            left_out.append(name)
            del columns[name]
    room = max(width - taken - _cells(columns), 8)
    indent = f"{'│ ':>{len(shared[0])}}" if shared else ""
    lines = [Text("  " + "".join(column[0] for column in columns.values()) + f" {indent}text", style=theme.DIM)]
    parts = departures.parts(texts, found, room)
    if len({part.plain for part in parts}) < len(set(texts)):  # some look the same where they leave their nearest
        parts = [Text(part) for part in departures.told_apart(texts, room)]
    for place, (entry, part) in enumerate(zip(shown, parts, strict=True)):
        line = Text(f"{entry.mark} " + "".join(column[place + 1] for column in columns.values()) + " ")
        line.append(shared[place] if shared else "")
        line.stylize(theme.CHOSEN if entry.mark == RETURNED else theme.PLAIN)
        line.append_text(part)
        line.stylize(theme.DIM if entry.mark == PUSHED_OUT else theme.PLAIN)
        lines.append(line)
    if len(entries) > len(shown):
        lines.append(Text(f"  … and {len(entries) - len(shown)} more", style=theme.DIM))
    words = [departures.legend(ids)] if shared else []
    words += [f"no room for {', '.join(left_out)}"] if left_out else []
    lines = [widgets.fit(line, width) for line in lines]
    legend = DOT.join([*_marks(entries, criterion(lane) if chosen else ""), *words])
    return lines + lines_of_items(Text(legend, style=theme.DIM), width)


def criterion(lane: LaneHistory) -> str:
    """By which score best_of or mbr_samples chooses, in words."""
    if lane.began is not None and lane.began.strategy == "mbr":
        return "the mean chrF with all samples"
    return f"log-probability / tokens ** {penalty_of(lane)!r}"


def _columns(entries: list[RankedSequence], *, without: Sequence[str] = ()) -> dict[str, list[str]]:
    """The columns before the text by name: head, then a cell for each entry."""
    rows = [entry.hypothesis for entry in entries]
    ends = list(map(_why, rows))
    column = max(len(why) for why in [*ends, "ended"])
    columns = {"rank": [f"{'rank':>4} ", *(f"{place:>4} " for place in range(1, len(rows) + 1))]}
    for name in [name for name in ("score", "total", "logprob") if name not in without]:
        columns[name] = [f"{name:>9} ", *(f"{number(getattr(row, name)):>9} " for row in rows)]
    columns["tokens"] = [f"{'tokens':>6} ", *(f"{row.length:>6} " for row in rows)]
    columns["ended"] = [f" {'ended':<{column}} ", *(f" {why:<{column}} " for why in ends)]
    return columns


def _cells(columns: dict[str, list[str]]) -> int:
    return sum(len(column[0]) for column in columns.values())


def _why(hypothesis: Hypothesis) -> str:
    return f"{hypothesis.reason} “{first_cells(hypothesis.cause, 12)}”" if hypothesis.cause else hypothesis.reason


def _marks(entries: list[RankedSequence], score: str) -> list[str]:
    if score:
        return [f"{RETURNED} returned for the highest score: {score}", f"{PUSHED_OUT} not returned"]
    words = [f"{RETURNED} returned"]
    if any(entry.mark == PUSHED_OUT for entry in entries):
        words.append(f"{PUSHED_OUT} pushed out by better ones")
    return words

"""A beam search on the screen: the common prefix, a line for each live row, the rows that died, what finished; and the
n-best table.

The picture is never taller than the terminal: the oldest lines of the prefix and the worst rows are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from genctl.events import Hypothesis, Stepped
from genctl.events.history import LaneHistory, Path
from genctl.terminal import departures, theme, widgets
from genctl.terminal.departures import meet, told_apart
from genctl.terminal.score_formula import number, penalty_of, score
from genctl.terminal.summary import DOT
from genctl.terminal.summary import lines as lines_of_items
from genctl.terminal.text_width import first_cells, last_cells, wrap

BEFORE = 32  # cells of a row before its text and its note
LONGEST_WORD = 40  # characters
FINISHED = 3  # lines kept for finished hypotheses, where the rows leave that many


@dataclass(frozen=True)
class Turn:
    """The last step of a lane, and the rows that it started from."""

    before: tuple[Path, ...]
    event: Stepped

    def forks(self) -> list[str]:
        """A mark for each row: `┬ ├ └` where several rows continue the same parent, else `─`."""
        children = Counter(row.parent for row in self.event.rows)
        seen: Counter[int] = Counter()
        marks = []
        for row in self.event.rows:
            seen[row.parent] += 1
            if children[row.parent] == 1:
                marks.append("─")
            else:
                marks.append("┬" if seen[row.parent] == 1 else "└" if seen[row.parent] == children[row.parent] else "├")
        return marks

    def died(self) -> list[int]:
        """The parents that no live and no finished row continues."""
        continued = {row.parent for row in self.event.rows} | {ended.parent for ended in self.event.ended}
        return [place for place in range(len(self.before)) if place not in continued]


def picture(
    lane: LaneHistory,
    turn: Turn | None,
    opening: str,
    shown: Path,
    width: int,
    height: int,
    *,
    beams: int,
    hidden: int = 0,
    prompt: int = 0,
) -> list[Text]:
    """The state of a lane in at most `height` lines of at most `width` cells.

    `opening` is the last, incomplete line of the certain text, of which the first `prompt` characters belong to the
    prompt, and `shown` the path at which it ends; `beams` is how many finished hypotheses the search keeps; `hidden`
    counts the other prompts in progress.
    """
    stem = meet(lane.rows) if lane.rows else shown
    start = max(shown.chars, stem.chars)
    rows = _rows(lane, turn, start, width, height)
    died = _died(turn, start, width)
    foot = [Text(f"… and {hidden} more under way", style=theme.DIM, no_wrap=True)] if hidden else []
    ended = _finished(lane, stem, width, beams)
    room = max(height - 1 - len(foot), 1)  # a line of stem
    rows = _cut(rows, max(room - min(len(ended), FINISHED) - len(died), min(room, 2)), "beams")
    room -= len(rows)
    ended = _cut(ended, max(room - len(died), 0), "finished")
    room -= len(ended)
    died = died[: max(room, 0)]
    more = stem.text(shown.chars) if stem.length > shown.length else ""
    above = _stem(opening, more, width, room - len(died) + 1, prompt)
    return [*above, *rows, *died, *ended, *foot][-height:]


def _stem(opening: str, more: str, width: int, height: int, prompt: int) -> list[Text]:
    certain = len(opening)
    lines = []
    for line in wrap(opening + more.replace("\n", "↵").replace("\t", "⇥"), width):
        text = Text(line.rstrip(), no_wrap=True)
        text.stylize(theme.DIM, min(max(certain, 0), len(text)))
        text.stylize(theme.PROMPT, 0, min(max(prompt, 0), len(text)))
        certain -= len(line)
        prompt -= len(line)
        lines.append(text)
    return lines[-max(height, 1) :]


def _rows(lane: LaneHistory, turn: Turn | None, start: int, width: int, height: int) -> list[Text]:
    if not lane.rows:
        return []
    penalty = penalty_of(lane)
    marks = turn.forks() if turn else []
    lines = [Text(f"{'rank':>4} {'from':>5} {'total':>9} {'score':>9}  text after what all share", style=theme.DIM)]
    seen = lane.rows[:height]  # there is no room for more
    noted = max((cell_len(f"[{row.live.note}] ") for row in seen if row.live.note), default=0)
    texts = told_apart([row.text(start) for row in seen], max(width - BEFORE - noted, 1), growing=True)
    for place, row in enumerate(lane.rows):
        line = Text(f"{place + 1:>4} ", style=theme.CHOSEN if place == 0 else theme.PLAIN)
        came = f"{turn.event.rows[place].parent + 1} {marks[place]}" if turn and len(marks) > place else ""
        line.append(f"{came:>5}", style=theme.DIM)
        line.append(f" {number(row.live.total):>9} {number(score(row.live.total, row.length, penalty)):>9}  ")
        if row.live.note:
            line.append(f"[{row.live.note}] ", style=theme.DIM)
        line.append(texts[place] if place < len(texts) else "")
        lines.append(line)
    return [widgets.fit(line, width) for line in lines]


def _died(turn: Turn | None, start: int, width: int) -> list[Text]:
    gone = turn.died() if turn else []
    if not gone or turn is None:
        return []
    line = Text(f"{'✗':>4} {'died':>5} ", style=theme.DIM)
    for place in gone:
        line.append(f" {place + 1} “{last_cells(from_word(turn.before[place], start), 16)}”")
    return [widgets.fit(line, width)]


def from_word(path: Path, start: int) -> str:
    """The text of a path from `start` on, or from the beginning of the word that is being written there."""
    back = path.text(max(start - LONGEST_WORD, 0))
    at = min(start, LONGEST_WORD)
    while 0 < at <= len(back) and not back[at - 1].isspace() and not back[at : at + 1].isspace():
        at -= 1
    return back[at:].lstrip(" ")


def _finished(lane: LaneHistory, stem: Path, width: int, beams: int) -> list[Text]:
    ended = by_score(lane.endings or ())
    lines = []
    for place, path in enumerate(ended[:beams], start=1):
        hypothesis = path.hypothesis
        line = Text(f"{'✓':>4} {place:>5} {number(hypothesis.total):>9} {number(hypothesis.score):>9}  ")
        line.append(f"{hypothesis.reason} after {len(hypothesis.tokens)}  ", style=theme.DIM)
        left = meet((path, stem)).chars  # where it left what the rows share
        text = first_cells((hypothesis.text or path.text())[left:], width - line.cell_len - 1)
        line.append(f"{'…' if left else ''}{text}")
        lines.append(line)
    if len(ended) > beams:
        lines.append(Text(f"{'':>10} … and {len(ended) - beams} pushed out", style=theme.DIM))
    return [widgets.fit(line, width) for line in lines]


def by_score(ended: Iterable[Path]) -> list[Path]:
    """Finished rows, given newest first: best score first, ties in the order in which they ended."""
    return sorted(list(ended)[::-1], key=lambda path: -path.hypothesis.score)


def _cut(lines: list[Text], height: int, what: str) -> list[Text]:
    if len(lines) <= height:
        return lines
    if height < 1:
        return []
    left = Text(f"{'':>4} … and {len(lines) - height + 1} more {what}", style=theme.DIM, no_wrap=True)
    return [*lines[: height - 1], left]


# -- the n-best table: what a search finished or a choice had, best first, and whether it was returned -----------------


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

"""A beam search on the screen: the common prefix, a line for each live row, the rows that died, what finished.

Never taller than the terminal: the oldest lines of the prefix and the worst rows are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from genctl.events import Stepped
from genctl.events.history import LaneHistory, Path
from genctl.terminal import theme, widgets
from genctl.terminal.common_prefix import meet
from genctl.terminal.departures import told_apart
from genctl.terminal.score_formula import number, penalty_of, score
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

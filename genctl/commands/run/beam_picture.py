"""A beam search on the screen: the common prefix, a line for each live row, the rows that died, what finished; and the
n-best table.

The picture is never taller than the terminal: the oldest lines of the prefix and the worst rows are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from genctl.events import Hypothesis, Stepped
from genctl.events.history import LaneHistory, Path
from genctl.events.stable_prefix import common_ancestor
from genctl.terminal import divergences, theme, widgets
from genctl.terminal.divergences import disambiguate
from genctl.terminal.score_formula import logprob_beside_total, number, penalty_of, score
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

    `opening` is the last, incomplete line of the stable text, of which the first `prompt` characters belong to the
    prompt, and `shown` the path at which it ends; `beams` is how many finished hypotheses the search keeps; `hidden`
    counts the other prompts in progress.
    """
    stem = common_ancestor(lane.rows) if lane.rows else shown
    start = max(shown.chars, stem.chars)
    foot = [Text(f"… and {hidden} more under way", style=theme.DIM)] if hidden else []
    died = _died(turn, start)
    ended = _finished(lane, stem, width, beams)
    room = max(height - 1 - len(foot), 1)  # a line of stem
    rows = _cut(
        _rows(lane, turn, start, width, height), max(room - min(len(ended), FINISHED) - len(died), min(room, 2))
    )
    room -= len(rows)
    ended = _cut(ended, max(room - len(died), 0))
    room -= len(ended)
    died = died[: max(room, 0)]
    above = opening + (stem.text(shown.chars) if stem.length > shown.length else "").replace("\n", "↵").replace(
        "\t", "⇥"
    )
    lines, stable = [], len(opening)
    for part in wrap(above, width):
        line = Text(part.rstrip(), no_wrap=True)
        line.stylize(theme.DIM, min(max(stable, 0), len(line)))
        line.stylize(theme.PROMPT, 0, min(max(prompt, 0), len(line)))
        stable, prompt = stable - len(part), prompt - len(part)
        lines.append(line)
    lines = lines[-max(room - len(died) + 1, 1) :]
    return [*lines, *(widgets.fit(line, width) for line in (*rows, *died, *ended, *foot))][-height:]


def _rows(lane: LaneHistory, turn: Turn | None, start: int, width: int, height: int) -> list[Text]:
    """A line for each live row, best first, under the heads of the columns."""
    if not lane.rows:
        return []
    penalty, marks = penalty_of(lane), turn.forks() if turn else []
    lines = [Text(f"{'rank':>4} {'from':>5} {'total':>9} {'score':>9}  text after what all share", style=theme.DIM)]
    seen = lane.rows[:height]  # there is no room for more
    noted = max((cell_len(f"[{row.live.note}] ") for row in seen if row.live.note), default=0)
    texts = disambiguate([row.text(start) for row in seen], max(width - BEFORE - noted, 1), growing=True)
    for place, row in enumerate(lane.rows):
        came = f"{turn.event.rows[place].parent + 1} {marks[place]}" if turn and len(marks) > place else ""
        sums = f" {number(row.live.total):>9} {number(score(row.live.total, row.length, penalty)):>9}  "
        note = f"[{row.live.note}] " if row.live.note else ""
        text = texts[place] if place < len(texts) else ""
        style = theme.CHOSEN if place == 0 else theme.PLAIN
        line = Text.assemble(f"{place + 1:>4} ", (f"{came:>5}", theme.DIM), sums, (note, theme.DIM), text, style=style)
        lines.append(line)
    return lines


def _died(turn: Turn | None, start: int) -> list[Text]:
    """A line with the ends of the rows that nothing continues; [] if there are none."""
    if turn is None or not (places := turn.died()):
        return []
    ends = [f" {place + 1} “{last_cells(from_word(turn.before[place], start), 16)}”" for place in places]
    return [Text.assemble((f"{'✗':>4} {'died':>5} ", theme.DIM), *ends)]


def from_word(path: Path, start: int) -> str:
    """The text of a path from `start` on, or from the beginning of the word that is being written there."""
    back = path.text(max(start - LONGEST_WORD, 0))
    at = min(start, LONGEST_WORD)
    while 0 < at <= len(back) and not back[at - 1].isspace() and not back[at : at + 1].isspace():
        at -= 1
    return back[at:].lstrip(" ")


def _finished(lane: LaneHistory, stem: Path, width: int, beams: int) -> list[Text]:
    """A line for each finished row that the search keeps, best first."""
    ended = by_score(lane.endings or ())
    lines = []
    for place, path in enumerate(ended[:beams], start=1):
        one = path.hypothesis
        line = Text(f"{'✓':>4} {place:>5} {number(one.total):>9} {number(one.score):>9}  ")
        line.append(f"{one.reason} after {len(one.tokens)}  ", style=theme.DIM)
        left = common_ancestor((path, stem)).chars  # where it diverges from what the rows share
        text = first_cells((one.text or path.text())[left:], width - line.cell_len - 1)
        lines.append(line.append(f"{'…' if left else ''}{text}"))
    if len(ended) > beams:
        lines.append(Text(f"{'':>10} … and {len(ended) - beams} pushed out", style=theme.DIM))
    return lines


def by_score(ended: Iterable[Path]) -> list[Path]:
    """Finished rows, given newest first: best score first, ties in the order in which they ended."""
    return sorted(list(ended)[::-1], key=lambda path: -path.hypothesis.score)


def _cut(lines: list[Text], height: int) -> list[Text]:
    """The first lines, and how many more there are."""
    if len(lines) <= height or height < 1:
        return lines[: max(height, 0)]
    more = Text(f"{'':>4} … and {len(lines) - height + 1} more", style=theme.DIM)
    return [*lines[: height - 1], more]


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

    Each text begins where it diverges from the one that it is nearest to.
    """
    entries = ranking(lane, beams)
    if not entries:
        return []
    shown = entries[: max(beams, sum(entry.mark == RETURNED for entry in entries)) + ROWS]
    rows = [entry.hypothesis for entry in shown]
    chosen = lane.finished is not None and bool(lane.finished.others)
    columns = {"rank": [Text(f"{entry.mark} {place:>4}") for place, entry in enumerate(shown, 1)]}
    for name in ("score", "logprob") if chosen else ("score", "total", "logprob"):
        values = [logprob_beside_total(row) if name == "logprob" else getattr(row, name) for row in rows]
        columns[name] = [Text(number(value)) for value in values]
    columns["tokens"] = [Text(str(row.length)) for row in rows]
    columns["ended"] = [
        Text(f"{row.reason} “{first_cells(row.cause, 12)}”" if row.cause else row.reason) for row in rows
    ]
    ids, texts = [row.tokens for row in rows], [entry.text for entry in shown]
    found = divergences.divergences(texts, ids)
    shared = divergences.column(found) or [""] * len(texts)
    room = width - len(shared[0])
    least = max(part.cell_len for part in divergences.parts(texts, found, TEXT))
    left_out = widgets.drop_columns(columns, room - least, LEAST_FIRST, space=2)
    used = sum(2 + max(len(name), *(cell.cell_len for cell in cells)) for name, cells in columns.items())
    parts = divergences.parts(texts, found, max(room - used, 8))
    if len({part.plain for part in parts}) < len(set(texts)):  # some look the same where they diverge
        parts = [Text(part) for part in disambiguate(texts, max(room - used, 8))]
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=theme.DIM)
    for name in columns:
        grid.add_column(name, justify="left" if name == "ended" else "right", no_wrap=True)
    grid.add_column(f"{'│ ' if any(shared) else '':>{len(shared[0])}}text", no_wrap=True, overflow="ellipsis")
    for place, (entry, part) in enumerate(zip(shown, parts, strict=True)):
        style = {RETURNED: theme.CHOSEN, PUSHED_OUT: theme.DIM}.get(entry.mark, theme.PLAIN)
        cells = [column[place] for column in columns.values()]
        grid.add_row(*cells, Text(shared[place]).append_text(part), style=style)
    lines = widgets.lines_of(grid, width)
    if len(entries) > len(shown):
        lines.append(Text(f"  … and {len(entries) - len(shown)} more", style=theme.DIM))
    words = [divergences.legend(ids)] if any(shared) else []
    words += [f"no room for {', '.join(left_out)}"] if left_out else []
    legend = DOT.join([*_marks(entries, criterion(lane) if chosen else ""), *words])
    return lines + lines_of_items(Text(legend, style=theme.DIM), width)


def criterion(lane: LaneHistory) -> str:
    """By which score best_of or mbr_samples chooses, in words."""
    if lane.began is not None and lane.began.strategy == "mbr":
        return "the mean chrF with all samples"
    return f"log-probability / tokens ** {penalty_of(lane)!r}"


def _marks(entries: list[RankedSequence], score: str) -> list[str]:
    if score:
        return [f"{RETURNED} returned for the highest score: {score}", f"{PUSHED_OUT} not returned"]
    words = [f"{RETURNED} returned"]
    if any(entry.mark == PUSHED_OUT for entry in entries):
        words.append(f"{PUSHED_OUT} pushed out by better ones")
    return words

"""A beam search as lines: its rows while it runs, and the n-best table at its end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from genctl.events import Hypothesis
from genctl.events.history import LaneHistory, Path, common_ancestor
from genctl.terminal import theme, widgets
from genctl.terminal.explain import logprob_beside_total, number, penalty_of, score
from genctl.terminal.live_layout import Look, Section, text_lines
from genctl.terminal.run_history import DOT
from genctl.terminal.run_history import lines as lines_of_items
from genctl.terminal.text_width import disambiguate, first_cells, last_cells, one_line, word_boundary

BEFORE = 32  # cells of a row before its text and its note
FINISHED = 3  # finished sequences that the picture shows


def picture(lane: LaneHistory, stable: Path, look: Look, console: Console, *, beams: int) -> list[Text]:
    """A running search as lines of a console: stable text, text shared by all live rows, the rows, finished sequences.

    `stable` is the path at which the stable text ends; `beams` is how many finished sequences the search keeps.
    """
    width, height = console.width, max(console.height - 1, 1)
    stem = common_ancestor(lane.rows) if lane.rows else stable
    more = stem.text(stable.chars)
    shared = [Text(f"…{last_cells(more, width - 1)}", theme.DIM)] if more else []
    ended = _finished(lane, stem, width, beams)
    rows = _rows(lane, max(stem.chars, stable.chars), width, height)
    room = max(height - 1 - len(shared) - len(ended), 2)
    if len(rows) > room:
        rows = [*rows[: room - 1], Text(f"{'':>4} … and {len(lane.rows) - room + 2} more", theme.DIM)]
    below = [*shared, *rows, *ended]
    above = text_lines(Section(lane, stable, ()), look, console, max(height - len(below), 1), width)
    return [*above, *(widgets.fit(line, width) for line in below)][-height:]


def _rows(lane: LaneHistory, start: int, width: int, height: int) -> list[Text]:
    """Column headings and a line for each live row, best first, with its text from character `start` on."""
    penalty, rows = penalty_of(lane), lane.rows[:height]  # more do not fit
    notes = [f"[{row.live.note}] " if row.live.note else "" for row in rows]
    room = max(width - BEFORE - max(map(cell_len, notes), default=0), 1)
    lines = [Text(f"{'rank':>4} {'from':>5} {'total':>9} {'score':>9}  text after what all share", theme.DIM)]
    texts = disambiguate([row.text(start) for row in rows], room, growing=True)
    for place, (row, note, text) in enumerate(zip(rows, notes, texts, strict=True), 1):
        total = row.live.total
        numbers = f"{number(total):>9} {number(score(total, row.length, penalty)):>9}"
        style = theme.CHOSEN if place == 1 else theme.PLAIN
        parent = f"{row.live.parent + 1:>5}"
        lines.append(Text.assemble(f"{place:>4} ", (parent, theme.DIM), f" {numbers}  ", (note, theme.DIM), text))
        lines[-1].style = style
    return lines if rows else []


def _finished(lane: LaneHistory, stem: Path, width: int, beams: int) -> list[Text]:
    """A line for each of the best finished sequences, with its text from where it leaves that of the live rows."""
    lines = []
    for place, path in enumerate(_by_score(lane.endings or ())[: min(beams, FINISHED)], 1):
        one, left = path.hypothesis, common_ancestor((path, stem)).chars
        line = Text(f"{'✓':>4} {place:>5} {number(one.total):>9} {number(one.score):>9}  ")
        line.append(f"{one.reason} after {len(one.tokens)}  ", theme.DIM)
        text = first_cells((one.text or path.text())[left:], width - line.cell_len - 1)
        lines.append(line.append(f"{'…' if left else ''}{text}"))
    return lines


def _by_score(ended: Iterable[Path]) -> list[Path]:
    """Sort finished rows, given newest first, by score, best first; ties in the order in which they ended."""
    return sorted(list(ended)[::-1], key=lambda path: -path.hypothesis.score)


# -- the n-best table: the finished sequences of a search, or the samples of a choice, best first ----------------------


ROWS = 20  # rows shown in addition to those that the search keeps
TEXT = 24  # minimum cells for the text, as long as less important columns can be dropped
LEAST_FIRST = ("logprob", "total", "tokens", "ended")
RETURNED, KEPT, PUSHED_OUT = "★", " ", "✗"
GROUPED = frozenset({"diverse-beam", "constrained-beam"})  # scores alone do not decide which sequences they keep


class Ranked(NamedTuple):
    """A finished sequence and its mark."""

    mark: str
    hypothesis: Hypothesis
    path: Path | None


def ranking(lane: LaneHistory, beams: int) -> list[Ranked]:
    """The finished sequences of a lane: the returned ones in their order, then the others by score.

    `beams` is how many finished sequences the search keeps; better ones pushed the others out.
    """
    returned = lane.finished.hypotheses if lane.finished else ()
    paths = lane.paths_of(returned)
    entries = [Ranked(RETURNED, one, path) for one, path in zip(returned, paths, strict=True)]
    if lane.finished and lane.finished.others:
        return entries + [Ranked(PUSHED_OUT, one, None) for one in lane.finished.others]
    matched = set(filter(None, paths))
    grouped = lane.began is not None and lane.began.strategy in GROUPED
    for path in _by_score(lane.endings or ()):
        if path not in matched:
            mark = KEPT if grouped or len(entries) < beams else PUSHED_OUT
            entries.append(Ranked(mark, path.hypothesis, path))
    return entries


def table(lane: LaneHistory, beams: int, width: int) -> list[Text]:
    """The n-best table in lines of at most `width` cells; [] if nothing finished.

    Texts that fit are shown in full, with the part shared with the text above dimmed; others show where they differ.
    """
    entries = ranking(lane, beams)
    if not entries:
        return []
    shown = entries[: max(beams, sum(entry.mark == RETURNED for entry in entries)) + ROWS]
    rows = [entry.hypothesis for entry in shown]
    chosen = lane.finished is not None and bool(lane.finished.others)  # from samples, which have no totals
    columns = {"rank": [Text(f"{entry.mark} {place:>4}") for place, entry in enumerate(shown, 1)]}
    columns["score"] = [Text(number(row.score)) for row in rows]
    columns |= {} if chosen else {"total": [Text(number(row.total)) for row in rows]}
    columns["logprob"] = [Text(number(logprob_beside_total(row))) for row in rows]
    columns["tokens"] = [Text(str(row.length)) for row in rows]
    columns["ended"] = [Text(row.reason + (f" “{first_cells(row.cause, 12)}”" if row.cause else "")) for row in rows]
    texts = [one.text or (path.text() if path else "") for _, one, path in shown]
    least = max(map(cell_len, disambiguate(texts, TEXT)))
    left_out = widgets.drop_columns(columns, width - 2 - least, LEAST_FIRST, space=2)
    used = sum(2 + max(len(name), *(cell.cell_len for cell in cells)) for name, cells in columns.items())
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=theme.DIM)
    for name in columns:
        grid.add_column(name, justify="left" if name == "ended" else "right", no_wrap=True)
    grid.add_column("│ text", no_wrap=True, overflow="ellipsis")
    before = ""
    for place, (text, part) in enumerate(zip(texts, disambiguate(texts, max(width - 2 - used, 8)), strict=True)):
        cell = Text(f"│ {part}")
        if part == one_line(text):
            cell.stylize(theme.DIM, 2, 2 + len(one_line(text[: word_boundary(text, before)])))
        style = {RETURNED: theme.CHOSEN, PUSHED_OUT: theme.DIM}.get(shown[place].mark, theme.PLAIN)
        grid.add_row(*(cells[place] for cells in columns.values()), cell, style=style)
        before = text
    lines = widgets.lines_of(grid, width)
    if len(entries) > len(shown):
        lines.append(Text(f"  … and {len(entries) - len(shown)} more", style=theme.DIM))
    words = [f"{RETURNED} returned"]
    if chosen:
        words = [f"{RETURNED} returned for the highest score: {criterion(lane)}", f"{PUSHED_OUT} not returned"]
    elif any(entry.mark == PUSHED_OUT for entry in entries):
        words.append(f"{PUSHED_OUT} pushed out by better ones")
    words += [f"no room for {', '.join(left_out)}"] if left_out else []
    return lines + lines_of_items(Text(DOT.join(words), style=theme.DIM), width)


def criterion(lane: LaneHistory) -> str:
    """The score by which best_of or mbr_samples chooses, in words."""
    if lane.began is not None and lane.began.strategy == "mbr":
        return "the mean chrF with all samples"
    return f"log-probability / tokens ** {penalty_of(lane)!r}"

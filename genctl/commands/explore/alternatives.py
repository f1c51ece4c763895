"""The tokens that may follow: probability by the model and after the processors, rank, and what removed each.

The whole vocabulary can be scrolled; only rows in view are drawn. A beam search stands in their place while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.message import Message
from textual.strip import Strip
from textual.widgets import Static

from genctl.commands.explore import marks
from genctl.commands.explore.panes import RowsPane
from genctl.events.history import LaneHistory
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import last_cells
from genctl.tree.distribution import Distribution


@dataclass(frozen=True)
class AlternativeColumns:
    """The cells of each column; 0: there is no room for it."""

    rank: int
    token: int
    logprob: int
    bar: int
    how: int
    second: bool

    @classmethod
    def of(cls, width: int, second: bool, vocabulary: int) -> AlternativeColumns:
        """What fits in `width` cells: the bar goes first.

        Where there is room for the reason or the log-probability, the reason stays; the line below the rows has both.
        """
        rank = max(len(str(vocabulary)), 4)
        room = width - 2 - rank - 1 - 1 - 7 - 7 - (14 if second else 0)
        logprob = 8 if (15 <= room < 27 or room >= 35) and not second else 0
        room -= logprob
        token = min(max(room - 18, 8), 20) if room >= 27 else max(min(room, 30), 6)
        how = min(room - token - 1, 44) if room >= 27 else 0
        bar = 10 if room - token - how >= 12 else 0
        return cls(rank, token, logprob, bar, how, second)


class Alternatives(RowsPane):
    """Rows of tokens, one of them selected."""

    class Selected(Message):
        """Another row is selected."""

    class Taken(Message):
        """A row was clicked twice."""

    class Fitted(Message):
        """The rows have another width: their heads must follow."""

    def __init__(self, *, id: str | None = None, coloured: bool = True) -> None:
        super().__init__(id=id)
        self.coloured = coloured
        self.first: Distribution | None = None
        self.other: Distribution | None = None
        self.chosen: int | None = None  # the token of the branch
        self.there: Collection[int] = ()  # tokens that the tree has here
        self.found: Sequence[int] | None = None  # ids, where a filter is on
        self.at = 0  # the selected row

    def __len__(self) -> int:
        if self.found is not None:
            return len(self.found)
        return 0 if self.first is None else len(self.first)

    @property
    def selected(self) -> int | None:
        """The id of the selected token."""
        return self._id_at(self.at) if 0 <= self.at < len(self) else None

    def _id_at(self, row: int) -> int:
        if self.found is not None:
            return int(self.found[row])
        assert self.first is not None
        return int(self.first.order[row])

    def show(
        self,
        first: Distribution | None,
        other: Distribution | None = None,
        *,
        chosen: int | None = None,
        there: Collection[int] = (),
        keep: bool = False,
    ) -> None:
        """Show a distribution, the chosen token selected; `keep` leaves the selection where it is."""
        selected = self.selected
        self.first, self.other, self.chosen, self.there = first, other, chosen, there
        if self.found is not None and first is not None:
            self.found = by_rank(self.found, first)
        wanted = selected if keep else chosen
        self.at = 0
        if wanted is not None and first is not None:
            self.at = self._row_of(wanted)
        self._measure()

    def filter(self, found: Sequence[int] | None) -> None:
        """Show these tokens only; None: all of them."""
        selected = self.selected
        self.found = found if found is None or self.first is None else by_rank(found, self.first)
        self.at = 0 if selected is None else self._row_of(selected)
        self._measure()

    def _row_of(self, id: int) -> int:
        if self.found is not None:
            return self.found.index(id) if id in self.found else 0
        return 0 if self.first is None else self.first.rank(id) - 1

    def _measure(self) -> None:
        self.measure(len(self))
        self.keep_in_view(self.at)
        self.refresh()

    def move(self, rows: int) -> None:
        """Select another row."""
        before, self.at = self.at, min(max(self.at + rows, 0), max(len(self) - 1, 0))
        if before == self.at:
            return
        self.keep_in_view(self.at)
        self.redraw(before, before + 1)
        self.redraw(self.at, self.at + 1)
        self.post_message(self.Selected())

    def on_resize(self) -> None:
        """Keep the selection in view."""
        self._measure()
        self.post_message(self.Fitted())

    # -- drawing -------------------------------------------------------------------------------------------------------

    @property
    def columns(self) -> AlternativeColumns:
        """The columns that fit."""
        return AlternativeColumns.of(
            self.room.width, self.other is not None, 0 if self.first is None else len(self.first)
        )

    def mass_in_view(self) -> float:
        """The model's probability of the rows in view together."""
        if self.first is None:
            return 0.0
        top = self.scroll_offset.y
        rows = [self.first.of(self._id_at(row)) for row in range(top, min(top + max(self.room.height, 1), len(self)))]
        return math.fsum(marks.probability_of(row.logprob) for row in rows)

    def heading(self) -> Text:
        """The heads of the columns."""
        columns = self.columns
        line = f"  {'rank':>{columns.rank}} {'token':<{columns.token}} {'A' if columns.second else 'prob':>6} "
        line += f"{'logprob':>{columns.logprob - 1}} " if columns.logprob else ""
        line += f"{'final':>6} "
        if columns.second:
            line += f"{'B':>6} {'final':>6} "
        line += f"{'':{columns.bar + 1}}" if columns.bar else ""
        return Text(line + ("changed by" if columns.how else ""), style=marks.DIM, no_wrap=True)

    def render_line(self, y: int) -> Strip:
        """One token."""
        row = y + self.scroll_offset.y
        width = self.room.width
        if self.first is None or row >= len(self):
            empty = "" if y or self.first is not None else "reading …"
            if self.found is not None and not self.found and not y:
                empty = "no token has this in it"
            return Strip([Segment(empty, marks.DIM)]).extend_cell_length(width).crop(0, width)
        self.drawn += 1
        line = self._line(self.first, self._id_at(row), self.columns)
        if row == self.at:
            line.stylize(marks.CURSOR)
        segments = [Segment(text, style) for text, style, _ in line.render(self.app.console)]
        strip = Strip(segments)
        return strip.adjust_cell_length(width, marks.CURSOR if row == self.at else None)

    def _line(self, first: Distribution, id: int, columns: AlternativeColumns) -> Text:
        row = first.of(id)
        probability, after = marks.probability_of(row.logprob), marks.probability_of(row.processed)
        removed = row.processed == -math.inf
        chosen = id == self.chosen
        line = Text("▸" if chosen else "•" if id in self.there else " ", no_wrap=True, end="")
        parting = self._parting(id)
        line.append(parting, style=theme.WINNER if self.coloured and parting != " " else theme.PLAIN)
        line.append(f"{row.rank:>{columns.rank}} ", style=marks.DIM)
        name = widgets.cells(widgets.token_text(id, row.text), columns.token)
        line.append(name, style=marks.BOLD if chosen else marks.DIM if removed else theme.PLAIN)
        line.append(f" {widgets.percent(probability)}", style=self._colour(probability))
        if columns.logprob:
            line.append(f" {marks.logprob(row.logprob):>{columns.logprob - 1}}", style=marks.DIM)
        line.append(f" {'–':>6}" if removed else f" {widgets.percent(after)}", style=self._colour(after))
        if self.other is not None:
            second = self.other.of(id)
            by_other, then = marks.probability_of(second.logprob), marks.probability_of(second.processed)
            line.append(f" {widgets.percent(by_other)}", style=self._colour(by_other))
            gone = second.processed == -math.inf
            line.append(f" {'–':>6}" if gone else f" {widgets.percent(then)}", style=self._colour(then))
        line.append(" ")
        if columns.bar:
            bar = widgets.bar(probability, columns.bar)
            line.append(bar.plain, style=bar.style if self.coloured else theme.PLAIN).append(" ")
        if columns.how:
            line.append(widgets.cells(widgets.visible(first.how(id)), columns.how), style=marks.DIM)
        return line

    def _parting(self, id: int) -> str:
        """≠ at what one of the two would take and the other not."""
        if self.first is None or self.other is None:
            return " "
        tops = {self.first.best, self.other.best}
        return "≠" if len(tops) > 1 and id in tops else " "

    def _colour(self, probability: float) -> Style:
        return theme.colour(probability) if self.coloured else theme.PLAIN

    def on_click(self, event: events.Click) -> None:
        """Select the row that was clicked; twice takes it."""
        place = event.get_content_offset(self)
        if place is None:
            return
        self.move(place.y + self.scroll_offset.y - self.at)
        if event.chain == 2:
            self.post_message(self.Taken())


def by_rank(ids: Sequence[int], distribution: Distribution) -> list[int]:
    """Ids by the model's probability, the most probable first."""
    wanted = np.zeros(len(distribution), bool)
    wanted[np.asarray(ids, np.int64)] = True
    order = np.asarray(distribution.order)
    found: list[int] = order[wanted[order]].tolist()
    return found


def matching(texts: Sequence[str], wanted: str) -> list[int]:
    """The ids whose text has `wanted` in it; case counts only where `wanted` has a capital letter."""
    if wanted != wanted.lower():
        return [id for id, text in enumerate(texts) if wanted in text]
    return [id for id, text in enumerate(texts) if wanted in text.lower()]


class Beams(Static):
    """Shown in the place of the alternatives while rows compete."""

    def __init__(self, *, id: str | None = None, coloured: bool = True) -> None:
        super().__init__(id=id, markup=False)
        self.coloured = coloured

    def show(self, history: LaneHistory) -> None:
        """Draw the rows of a search."""
        width = max(self.size.width, 20)
        lines = [Text(f"beam search, step {history.steps}", style=marks.DIM, no_wrap=True)]
        for number, path in enumerate(history.rows, 1):
            row = path.row
            total, logprob = getattr(row, "total", 0.0), getattr(row, "logprob", 0.0)
            share = marks.probability_of(logprob / max(path.length, 1))
            line = Text(f"{number:>2} ", style=marks.DIM, no_wrap=True)
            line.append(f"{widgets.rounded(total):>9} ", style=theme.colour(share) if self.coloured else theme.PLAIN)
            line.append(last_cells(path.text(max(path.chars - 4 * width, 0)), max(width - 14, 8)))
            lines.append(line)
        ended = list(history.endings or ())
        if ended:
            lines.append(Text(f"{len(ended)} ended", style=marks.DIM))
        for path in ended[:4]:
            lines.append(widgets.fit(Text(f"   {last_cells(path.text(), max(width - 4, 8))}"), width))
        self.update(Text("\n").join(lines))

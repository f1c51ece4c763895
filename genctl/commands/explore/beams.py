"""A beam search while it runs: its rows, the best first."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from genctl.commands.explore import marks
from genctl.history import LaneHistory
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import last_cells


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

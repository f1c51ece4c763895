"""A table of numbers with a name before each row."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from genctl.terminal import theme, widgets


def table_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[Text]:
    """A table whose first column names the row; columns that do not fit go into a further table below."""
    columns = [[headings[place], *(row[place] for row in rows)] for place in range(len(headings))]
    cells = [max(map(cell_len, map(widgets.visible, column))) for column in columns]
    room = 10**9 if width is None else width
    cells[0] = min(cells[0], first_column(room))
    lines: list[Text] = []
    for start, end in _shares(cells, room):
        if lines:
            lines.append(Text(""))
        for row in range(len(rows) + 1):
            line = Text(style=theme.DIM if row == 0 else theme.PLAIN, no_wrap=True)
            line.append(
                widgets.cells(widgets.visible(columns[0][row]), cells[0]), style=theme.HEADING if row else theme.DIM
            )
            for column in range(start, end):
                shown = widgets.visible(columns[column][row])
                line.append("  " + " " * (cells[column] - cell_len(shown)) + shown)
            line.rstrip()
            lines.append(line)
    return lines


def first_column(width: int) -> int:
    """Cells that the names of rows may have."""
    return max(width // 3, 8)


def _shares(cells: Sequence[int], room: int) -> list[tuple[int, int]]:
    """The columns of each table, from `start` to `end`, where all tables have the first one: as few as fit, as even as
    they can be.
    """

    def split(room: int) -> list[tuple[int, int]]:
        shares, start = [], 1
        while start < len(cells):
            end, used = start, cells[0]
            while end < len(cells) and (end == start or used + 2 + cells[end] <= room):
                used += 2 + cells[end]
                end += 1
            shares.append((start, end))
            start = end
        return shares or [(1, 1)]

    fewest, least = len(split(room)), room
    while fewest > 1 and least > 1 and len(split(least - 1)) == fewest:
        least -= 1
    return split(least)

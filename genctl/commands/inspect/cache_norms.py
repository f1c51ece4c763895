"""A heat map of the norms of keys and values by layer and position: numbers, coloured by share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.style import Style
from rich.text import Text

from genctl.commands.inspect.cache_report import PIPE
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import hanging

LABEL = 8  # cells before the first position
CELL = 6  # cells of a position
BLOCKS = 6  # blocks of positions that are shown; of more the first and the last ones


def heatmap_lines(heatmap: Mapping[str, Any], width: int | None) -> list[Text]:
    """The norms in blocks of positions, in lines of at most `width` cells.

    A line is a layer's keys (k) or values (v); colours are shares of its largest norm. `·` marks a position that a
    window dropped.
    """
    page = width or PIPE
    lines = _part(heatmap, page, "self-attention" if "cross" in heatmap else "")
    if "cross" in heatmap:
        lines += _part(heatmap["cross"], page, "cross-attention")
    return [*(widgets.fit(line, page) for line in lines), *_legend(page)]


def _part(part: Mapping[str, Any], width: int, name: str) -> list[Text]:
    lines = [widgets.header(width, "norms of keys and values", name)]
    per = max((width - LABEL) // CELL, 1)
    starts = list(range(0, len(part["positions"]), per))
    shown = starts if len(starts) <= BLOCKS else [*starts[: BLOCKS - 1], starts[-1]]
    before = -per
    for start in shown:
        if start != before + per:
            left = Text(f"positions {before + per} to {start - 1} are left out; --format json has them all")
            left.stylize(theme.DIM)
            lines.append(left)
        lines += _block(part, start, min(start + per, len(part["positions"])))
        before = start
    return lines


def _block(part: Mapping[str, Any], start: int, end: int) -> list[Text]:
    numbers = Text("position".ljust(LABEL), style=theme.DIM)
    tokens = Text("token".ljust(LABEL), style=theme.DIM)
    for place in range(start, end):
        numbers.append(f"{part['positions'][place]:>{CELL}}")
        text = widgets.first_words(part["tokens"][place].strip() or "␣", CELL - 1)
        tokens.append(" " * (CELL - Text(text).cell_len) + text)
    lines = [numbers, tokens]
    for layer in part["layers"]:
        for letter, values in (("k", layer["keys"]), ("v", layer["values"])):
            line = Text().append(f"{layer['layer']:>{LABEL - 3}} {letter} ", style=theme.DIM)
            most = max((value for value in values if value is not None), default=0.0)
            for value in values[start:end]:
                line.append(_cell(value, most))
            lines.append(line)
    return lines


def _cell(value: float | None, most: float) -> Text:
    if value is None:
        return Text(f"{'·':>{CELL}}", style=theme.DIM)
    return Text(_number(value).rjust(CELL), style=theme.colour(value / most if most else 0.0))


def _number(value: float) -> str:
    """At most five characters."""
    for digits in (2, 1, 0):
        text = f"{value:.{digits}f}"
        if len(text) <= CELL - 1:
            return text
    return f"{value:.0e}".replace("e+0", "e")


def _legend(width: int) -> list[Text]:
    lines = hanging("", "L2 norms, mean of heads and rows; colour: share of the layer's longest", width - 7, theme.DIM)
    lines[-1].append(" ")
    for step in range(0, 11, 2):
        lines[-1].append("█", style=Style(dim=False) + theme.colour(step / 10))
    return lines

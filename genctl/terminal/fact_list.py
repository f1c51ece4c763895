"""A list of things with a few facts each: a table where it fits, else each name with its facts beneath."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

NUMBERS = ("size", "context")  # columns to the right


def fact_lines(
    heads: Mapping[str, str], rows: Sequence[Sequence[str]], beneath: Sequence[Sequence[str]], console: Console
) -> Iterator[Text]:
    """The lines of `rows`, each with those `beneath` it. `heads` gives the unit of a fact where there is no table."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    fits = sum(widths) + 2 * (len(widths) - 1) <= console.width

    def line(cells: Sequence[str]) -> str:
        pairs = zip(cells, widths, heads, strict=True)
        padded = [f"{cell:{'>' if head in NUMBERS else '<'}{width}}" for cell, width, head in pairs]
        return "  ".join(padded).rstrip()

    def folded(text: str, style: str = "", indent: int = 0) -> Iterator[Text]:
        for part in Text(text, style).wrap(console, console.width - indent, overflow="fold"):
            yield Text(" " * indent) + part

    if fits:
        yield from folded(line(list(heads)), "dim")
    for cells, details in zip(rows, beneath, strict=True):
        yield from folded(line(cells) if fits else cells[0], "" if fits else "bold")
        facts = [
            f"{cell} {unit}".rstrip()
            for cell, unit in zip(cells[1:], list(heads.values())[1:], strict=True)
            if cell != "-"
        ]
        if not fits and facts:
            yield from folded(" · ".join(facts), indent=2)
        for detail in details:
            yield from folded(detail, "dim", indent=2)

"""Charts as SVG elements with classes and no styles: a page's policy allows its style sheet alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 340, 190  # pixels; two stand side by side, one fits on a phone
LEFT, BOTTOM, TOP = 44, 34, 10  # room for labels


def bars(title: str, labels: Sequence[str], counts: Sequence[int]) -> str:
    """A bar for each label, with its count above it."""
    highest = max([1, *counts])
    slot = (WIDTH - LEFT) / max(len(counts), 1)
    parts = [_line(LEFT, HEIGHT - BOTTOM, WIDTH, HEIGHT - BOTTOM)]
    for place, (label, number) in enumerate(zip(labels, counts, strict=True)):
        height = (HEIGHT - BOTTOM - TOP - 14) * number / highest
        x, y = LEFT + place * slot, HEIGHT - BOTTOM - height
        if number:
            parts.append(
                f'<rect class="bar" x="{x + 1.5:.1f}" y="{y:.1f}" width="{slot - 3:.1f}" height="{max(height, 1):.1f}">'
                f"<title>{escape(label)}: {number:,}</title></rect>"
            )
            parts.append(_text(x + slot / 2, y - 3, f"{number:,}", "middle", "figures"))
        if place % 2 == 0:
            parts.append(_text(x + slot / 2, HEIGHT - BOTTOM + 14, label, "middle", "soft figures"))
    return _svg(title, parts)


def curve(title: str, lines: Sequence[tuple[str, Sequence[float]]], floor: float) -> str:
    """Lines on a logarithmic scale by index; each has a class. Values below `floor`, zero too, are drawn there."""
    logs = [[math.log10(max(value, floor)) for value in values] for _, values in lines]
    every = [value for values in logs for value in values]
    low, high = math.floor(min(every, default=0)), math.ceil(max(every, default=1))
    high = max(high, low + 1)
    count = max((len(values) for values in logs), default=1)

    def x(index: int) -> float:
        return LEFT + (WIDTH - LEFT - 6) * index / max(count - 1, 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - BOTTOM - TOP) * (high - value) / (high - low)

    parts = []
    step = max((high - low) // 4, 1)
    for power in range(low, high + 1, step):
        parts.append(_line(LEFT, y(power), WIDTH, y(power)))
        parts.append(_text(LEFT - 5, y(power) + 4, f"{10.0**power:.0e}".replace("e+00", ""), "end", "soft figures"))
    for index in sorted({0, (count - 1) // 2, count - 1}):
        anchor = "end" if index == count - 1 and index else "middle"
        parts.append(_text(x(index), HEIGHT - BOTTOM + 14, f"{index + 1}", anchor, "soft figures"))
    for (name, _), values in zip(lines, logs, strict=True):
        points = " ".join(f"{x(index):.1f},{y(value):.1f}" for index, value in enumerate(values))
        if len(values) == 1:
            parts.append(f'<circle class="dot" cx="{x(0):.1f}" cy="{y(values[0]):.1f}" r="3"/>')
        else:
            parts.append(f'<polyline class="{escape(name)}" points="{points}"/>')
    return _svg(title, parts)


def _svg(title: str, parts: Sequence[str]) -> str:
    shown = escape(title)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg role="img" aria-label="{shown}" {size}>{"".join(parts)}</svg>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="axis" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'

"""Styles: one probability ramp for terminal and HTML, and a few text styles.

Colour is never the only sign: a number, a bar's length or a word says the same.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from rich.color import Color
from rich.style import Style

# From improbable to certain. Mid-bright tones, so that they can be read on a dark and on a light background.
RAMP: tuple[tuple[float, tuple[int, int, int]], ...] = (
    (0.0, (207, 62, 84)),
    (0.25, (212, 108, 46)),
    (0.5, (176, 136, 24)),
    (0.75, (88, 152, 62)),
    (1.0, (24, 150, 140)),
)

DIM = Style(dim=True)
PROMPT = Style(dim=True)
HEADING = Style(bold=True)
CHOSEN = Style(bold=True)
WINNER = Style(color=Color.parse("magenta"), bold=True)
ERROR = Style(color=Color.parse("red"), bold=True)
PLAIN = Style()


def ramp(probability: float) -> tuple[int, int, int]:
    """The colour of a probability in [0, 1] as red, green, blue in 0..255; values outside count as the nearer end."""
    here = min(max(probability, 0.0), 1.0)
    for (low, dark), (high, bright) in pairwise(RAMP):
        if here <= high:
            share = (here - low) / (high - low)
            red, green, blue = (round(a + (b - a) * share) for a, b in zip(dark, bright, strict=True))
            return red, green, blue
    return RAMP[-1][1]


def colour(probability: float) -> Style:
    """The ramp for a terminal; Rich maps it to 256 or 16 colours where there are no more. NaN counts as 0."""
    return _step(round(min(max(0.0, probability), 1.0) * 40))


@lru_cache(maxsize=64)
def _step(step: int) -> Style:
    return Style(color=Color.from_rgb(*ramp(step / 40)))

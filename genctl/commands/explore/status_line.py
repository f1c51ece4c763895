"""The line at the bottom: what runs, and the figures of the place where the cursor is."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from genctl.commands.explore import marks
from genctl.terminal import widgets


@dataclass(frozen=True)
class StatusFigures:
    """What the line shows. None: not known."""

    state: str = ""  # what runs, or an answer to the last key
    failed: bool = False  # the answer is an error
    entropy: float | None = None  # of the model's distribution, in nats
    mass: float | None = None  # of the alternatives in view, by the model
    logprob: float | None = None  # of the path, in nats
    shared: int | None = None  # columns of the cache that other branches have too
    own: int | None = None
    speed: float | None = None  # tokens per second
    knobs: str = ""  # settings that were changed


def status_text(figures: StatusFigures, width: int, *, coloured: bool) -> Text:
    """Two lines at most of `width` cells: the state, then as many figures as fit."""
    found = []
    if figures.entropy is not None:
        found.append(f"entropy {figures.entropy:.2f}")
    if figures.mass is not None:
        found.append(f"mass shown {widgets.percent(figures.mass).strip()}")
    if figures.logprob is not None:
        found.append(f"logprob {widgets.rounded(figures.logprob)}")
    if figures.shared is not None and figures.own is not None:
        found.append(f"cache {figures.shared} shared, {figures.own} own")
    if figures.speed is not None:
        found.append(f"{figures.speed:.1f} tokens/s")
    if figures.knobs:
        found.append(figures.knobs)
    first = Text(no_wrap=True, end="")
    if figures.state:
        style = "bold red" if figures.failed and coloured else marks.BOLD
        first.append(widgets.first_words(figures.state, width), style=style)
    lines = [first]
    for words in found:
        line = lines[-1]
        if line.cell_len and line.cell_len + 3 + len(words) > width:
            if len(lines) == 2:
                break
            line = Text(no_wrap=True, end="")
            lines.append(line)
        if line.cell_len:
            line.append(" · ", style=marks.DIM)
        line.append(widgets.first_words(words, width), style=marks.DIM)
    return Text("\n").join(lines)

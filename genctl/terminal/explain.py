"""How a token was chosen and how a hypothesis got its score.

The effect of each logits processor, as lines under a token and as a summary of a run; and the formula of a score.
"""

from __future__ import annotations

import math

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from genctl.events import Hypothesis, Token, Trace
from genctl.events.history import LaneHistory
from genctl.terminal import theme, widgets
from genctl.terminal.run_history import RunHistory, touched
from genctl.terminal.text_width import hanging

_INDENT = 7
_MOVED = 4  # cells of the bar
_FIXED = 58  # cells of all columns but the processor's name, with the mark of a new winner


def explain_lines(token: Token, width: int = 80) -> list[Text]:
    """The effect of each processor on this token: one line for each that changed something, one for all others."""
    lines = [_line(trace, width) for trace in token.trace if touched(trace)]
    idle = [widgets.visible(trace.processor) for trace in token.trace if not touched(trace)]
    if idle:
        lines += hanging(f"{'':{_INDENT}}unmoved by ", ", ".join(idle), width, theme.DIM)
    return lines


def explain_heading(width: int = 80) -> Text:
    """The column heads of `explain_lines`."""
    heads = f"{'':{_INDENT}}{'processor':<{_name_cells(width)}} {'removed':>8}"
    return widgets.fit(Text(f"{heads}  {'mass moved':<{_MOVED + 7}}  chosen token", style=theme.DIM), width)


def explain_summary(history: RunHistory, width: int | None = None) -> RenderableType:
    """The effect of each processor over the whole run. Means are over the steps that it changed."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style=theme.DIM)
    table.add_column("\nprocessor", overflow="fold")
    for heading in ("steps\ntouched", "removed\n(mean)", "mass moved\n(mean)", "winners\nchanged", "\ntime"):
        table.add_column(heading, justify="right", no_wrap=True)
    for tally in history.tallies.values():
        cells = [Text(f"{tally.touched} of {tally.steps}"), *[Text("–")] * 3]
        if tally.touched:
            moved = tally.moved / tally.touched
            winners = Text(f"{tally.changed:,}", style=theme.WINNER if tally.changed else theme.PLAIN)
            mass = Text(widgets.percent(moved).strip(), style=theme.colour(1.0 - moved))
            cells[1:] = [Text(f"{tally.removed / tally.touched:,.1f}"), mass, winners]
        style = theme.PLAIN if tally.touched else theme.DIM
        table.add_row(Text(widgets.visible(tally.processor)), *cells, Text(_time(tally.seconds)), style=style)
    legend = "means over the steps touched · mass moved: probability that changed hands"
    return Group(Text("What the processors did", style=theme.HEADING), table, Text(legend, style=theme.DIM))


def _line(trace: Trace, width: int) -> Text:
    line = Text(" " * _INDENT).append(widgets.cells(widgets.visible(trace.processor), _name_cells(width)))
    line.append(f" {f'−{trace.removed:,}' if trace.removed else '–':>8}  ")
    line.append_text(widgets.bar(trace.moved, _MOVED)).append(f" {widgets.percent(trace.moved)}")
    before, after = widgets.percent(trace.before), widgets.percent(trace.after)
    direction = "" if before == after else "green" if trace.after > trace.before else "red"
    line.append(f"  {before} → {after}", style=direction)
    if trace.changed:
        line.append("  new winner", style=theme.WINNER)
    return widgets.fit(line, width)


def _name_cells(width: int) -> int:
    return min(max(width - _FIXED, 12), 34)


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def searches(lane: LaneHistory) -> bool:
    """Whether the rows of a lane compete, and totals and scores decide between them."""
    return lane.began is not None and "beam" in lane.began.strategy


def penalty_of(lane: LaneHistory) -> float:
    """The recorded length_penalty of a lane; 1 if its settings have none, 0 if it did not begin."""
    if lane.began is None:
        return 0.0
    setting = lane.began.settings.get("length_penalty")
    return float(setting) if isinstance(setting, (int, float)) and not isinstance(setting, bool) else 1.0


def score(total: float, tokens: int, penalty: float) -> float:
    """total / tokens ** length_penalty; no tokens count as one."""
    try:
        return float(total / max(tokens, 1) ** penalty)
    except OverflowError:  # the divisor exceeds all floats
        return 0.0
    except ZeroDivisionError:
        return math.copysign(math.inf, total)


def number(value: float) -> str:
    """A log-probability, total or score in at most nine characters, unless it is huge. No -0.000."""
    if 5e-7 <= abs(value) < 0.0095:
        return f"{value:.6f}"
    return widgets.rounded(value)


def logprob_beside_total(one: Hypothesis) -> float:
    """Its log-probability, or its total if the two differ by rounding alone, so that both look the same."""
    return one.total if math.isclose(one.logprob, one.total, rel_tol=2e-6) else one.logprob


def formula(lane: LaneHistory, best: Hypothesis) -> str:
    """The score of a hypothesis as a formula on one line."""
    numbers = f"{number(best.total)} / {len(best.tokens)} ** {penalty_of(lane)!r}"
    return f"score = total / tokens ** length_penalty = {numbers} = {number(best.score)}"

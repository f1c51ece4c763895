"""The effect of each logits processor: lines under a token, and a summary table of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from genctl.events import Token, Trace
from genctl.render import theme, widgets
from genctl.render.run_history import RunHistory, touched

_INDENT = 7
_MOVED = 4  # cells of the bar
_FIXED = _INDENT + 51  # all columns but the processor's name
_LONGEST = 34  # cells of a name


def explain_lines(token: Token, width: int = 80) -> list[Text]:
    """The effect of each processor on this token: one line for each that changed something, one for the others."""
    lines = [_line(trace, width) for trace in token.trace if touched(trace)]
    idle = [widgets.visible(trace.processor) for trace in token.trace if not touched(trace)]
    if idle:
        lines += _wrapped("unmoved by ", idle, width)
    return lines


def explain_heading(width: int = 80) -> Text:
    """The column heads of `explain_lines`."""
    text = (
        f"{'':{_INDENT}}{'processor':<{_name_width(width)}} {'removed':>8}  {'mass moved':<{_MOVED + 7}}  chosen token"
    )
    return Text(text, style=theme.DIM, no_wrap=True)


def explain_summary(history: RunHistory) -> RenderableType:
    """The effect of each processor over the whole run. Means are over the steps that it changed."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style=theme.DIM)
    table.add_column("\nprocessor", overflow="fold")
    for name in ("steps\ntouched", "removed\n(mean)", "mass moved\n(mean)", "winners\nchanged", "\ntime"):
        table.add_column(name, justify="right", no_wrap=True)
    for tally in history.tallies.values():
        steps = Text(f"{tally.touched} of {tally.steps}")
        processor = Text(widgets.visible(tally.processor))
        if not tally.touched:
            table.add_row(processor, steps, "–", "–", "–", _time(tally.seconds), style=theme.DIM)
            continue
        moved = tally.moved / tally.touched
        table.add_row(
            processor,
            steps,
            f"{tally.removed / tally.touched:,.1f}",
            Text(widgets.percent(moved).strip(), style=theme.colour(1.0 - moved)),
            Text(str(tally.changed), style=theme.WINNER if tally.changed else theme.PLAIN),
            _time(tally.seconds),
        )
    legend = "means over the steps touched · mass moved: probability that changed hands"
    return Group(Text("What the processors did", style=theme.HEADING), table, Text(legend, style=theme.DIM))


def _line(trace: Trace, width: int) -> Text:
    line = Text(" " * _INDENT, no_wrap=True)
    line.append(widgets.cells(widgets.visible(trace.processor), _name_width(width)))
    removed = f"−{trace.removed:,}" if trace.removed else "–"
    line.append(f" {removed:>8}  ")
    line.append_text(widgets.bar(trace.moved, _MOVED))
    line.append(f" {widgets.percent(trace.moved)}")
    line.append(f"  {widgets.percent(trace.before)} → {widgets.percent(trace.after)}", style=_direction(trace))
    if trace.changed:
        line.append("  new winner", style=theme.WINNER)
    return line


def _name_width(width: int) -> int:
    return min(max(width - _FIXED, 12), _LONGEST)


def _direction(trace: Trace) -> str:
    return "" if trace.after == trace.before else "green" if trace.after > trace.before else "red"


def _wrapped(before: str, names: Sequence[str], width: int) -> list[Text]:
    lines = [Text(" " * _INDENT + before, style=theme.DIM, no_wrap=True)]
    for place, name in enumerate(names):
        piece = name + (", " if place + 1 < len(names) else "")
        if lines[-1].cell_len + cell_len(piece.rstrip()) > width and place:
            lines.append(Text(" " * (_INDENT + len(before)), style=theme.DIM, no_wrap=True))
        lines[-1].append(piece)
    return lines


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"

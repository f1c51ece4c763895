"""The effect of each logits processor: lines under a token, and a summary table of a run."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from genctl.events import Token, Trace
from genctl.terminal import theme, widgets
from genctl.terminal.run_history import ProcessorTally, RunHistory, touched
from genctl.terminal.text_width import hanging

_INDENT = 7
_MOVED = 4  # cells of the bar
_REMOVED = 9  # cells of the removed tokens, with a space
_FIXED = 37  # the other columns but the processor's name, with the mark of a new winner
_SHORTEST, _LONGEST = 16, 34  # cells of a name
_LEAST_FIRST = ("time", "winners\nchanged", "removed\n(mean)")  # columns of the summary


def explain_lines(token: Token, width: int = 80) -> list[Text]:
    """The effect of each processor on this token: one line for each that changed something, one for the others."""
    lines = [_line(trace, width) for trace in token.trace if touched(trace)]
    idle = [widgets.visible(trace.processor) for trace in token.trace if not touched(trace)]
    if idle:
        lines += hanging(f"{'':{_INDENT}}unmoved by ", ", ".join(idle), width, theme.DIM)
    return lines


def explain_heading(width: int = 80) -> Text:
    """The column heads of `explain_lines`."""
    name, bar, removed = _columns(width)
    text = f"{'':{_indent(bar)}}{'processor':<{name}}" + (f" {'removed':>8}" if removed else "")
    text += f"  {'mass moved' if bar else 'moved':<{bar + 7 if bar else 6}}  chosen token"
    return Text(text, style=theme.DIM, no_wrap=True)


def no_room(width: int) -> list[str]:
    """The columns of `explain_lines` that a narrow terminal lacks."""
    _, bar, removed = _columns(width)
    return [] if removed else ["removed"] if bar else ["the bar of the mass moved", "removed"]


def explain_summary(history: RunHistory, width: int | None = None) -> RenderableType:
    """The effect of each processor over the whole run, in `width` cells. Means are over the steps that it changed."""
    tallies = history.tallies.values()
    names = [Text(widgets.visible(tally.processor)) for tally in tallies]
    columns: dict[str, list[Text]] = {
        "steps\ntouched": [Text(f"{tally.touched} of {tally.steps}") for tally in tallies],
        "removed\n(mean)": [_mean(tally, f"{tally.removed / max(tally.touched, 1):,.1f}") for tally in tallies],
        "mass moved\n(mean)": [_mean(tally, *_moved(tally)) for tally in tallies],
        "winners\nchanged": [
            _mean(tally, f"{tally.changed:,}", theme.WINNER if tally.changed else theme.PLAIN) for tally in tallies
        ],
        "time": [Text(_time(tally.seconds)) for tally in tallies],
    }
    names_fit = min(max(len("processor"), *(name.cell_len for name in names)), _LONGEST)
    left_out = [] if width is None else widgets.drop_columns(columns, width - names_fit, _LEAST_FIRST, space=3)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style=theme.DIM)
    table.add_column("\nprocessor", no_wrap=True, overflow="ellipsis")
    for column in columns:
        table.add_column(column if "\n" in column else f"\n{column}", justify="right", no_wrap=True)
    for tally, name, *cells in zip(tallies, names, *columns.values(), strict=True):
        table.add_row(name, *cells, style=theme.PLAIN if tally.touched else theme.DIM)
    legend = "means over the steps touched · mass moved: probability that changed hands"
    legend += f" · no room for {', '.join(left_out).replace(chr(10), ' ')}" if left_out else ""
    return Group(Text("What the processors did", style=theme.HEADING), table, Text(legend, style=theme.DIM))


def _mean(tally: ProcessorTally, shown: str, style: Style = theme.PLAIN) -> Text:
    return Text(shown, style=style) if tally.touched else Text("–")


def _moved(tally: ProcessorTally) -> tuple[str, Style]:
    moved = tally.moved / max(tally.touched, 1)
    return widgets.percent(moved).strip(), theme.colour(1.0 - moved)


def _line(trace: Trace, width: int) -> Text:
    name, bar, removed = _columns(width)
    line = Text(" " * _indent(bar), no_wrap=True)
    line.append(widgets.cells(widgets.visible(trace.processor), name))
    if removed:
        line.append(f" {f'−{trace.removed:,}' if trace.removed else '–':>8}")
    line.append("  ")
    if bar:
        line.append_text(widgets.bar(trace.moved, bar)).append(" ")
    line.append(widgets.percent(trace.moved))
    before, after = widgets.percent(trace.before), widgets.percent(trace.after)
    direction = "" if before == after else "green" if trace.after > trace.before else "red"
    line.append(f"  {before} → {after}", style=direction)
    if trace.changed:
        line.append("  new winner", style=theme.WINNER)
    return line


def _indent(bar: int) -> int:
    return _INDENT if bar else _INDENT - 2


def _columns(width: int) -> tuple[int, int, bool]:
    """Cells of the name and of the bar, and whether there is room for the removed tokens."""
    for bar, removed in ((_MOVED, True), (_MOVED, False), (0, False)):
        room = width - _indent(bar) - _FIXED - (bar + 1 if bar else 0) - (_REMOVED if removed else 0)
        if room >= _SHORTEST:
            break
    return min(max(room, 12), _LONGEST), bar, removed


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"

"""The input of each pass, with and without a cache, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from genctl.commands.inspect.cache_report import PIPE, Report
from genctl.errors import count
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import hanging, wrap

LABEL = 17  # cells
ROWS = 4  # rows of a batch that are shown
FIELDS = ("input_ids", "cache_position", "position_ids", "attention_mask", "past_length")
NAMES = {"past_length": "past length"}


def given_lines(report: Report, width: int | None) -> list[Text]:
    """A block for each pass, in lines of at most `width` cells."""
    page = width or PIPE
    lines: list[Text] = []
    beside = any(step["without_cache"] is not None for step in report["steps"])
    for step in report["steps"]:
        lines += _block(step, page, beside, "prompts" in report)
    if report.get("tokens_agree") is False:
        lines.append(Text("the tokens written without a cache are not the same", style=theme.ERROR))
    elif beside:
        lines.append(Text("with and without a cache the same tokens were written", style=theme.DIM))
    return lines


def _block(step: Mapping[str, Any], width: int, beside: bool, many: bool) -> list[Text]:
    rows = len(step["input_ids"])
    words = ["the prompt" if step["step"] == 0 else count(len(step["input_ids"][0]), "token")]
    if many and step["step"] == 0:
        words = [f"prompt {step['rows'][0] + 1}"]
    if rows > 1:
        words.append(count(rows, "row"))
    lines = [widgets.header(width, f"step {step['step']}", *words)]
    other = step["without_cache"]
    column = (width - LABEL - 2) // 2 if beside else width - LABEL
    if beside:
        heads = Text(" " * LABEL + widgets.cells("with the cache", column) + "  without a cache", style=theme.DIM)
        heads.rstrip()
        lines.append(heads)
    for name in FIELDS:
        mine = _shown(name, step[name], column)
        theirs = [] if not beside else _shown(name, other.get(name), column) if other is not None else ["–"]
        if beside and name == "cache_position":
            theirs = []
        label = NAMES.get(name, name)
        for place in range(max(len(mine), len(theirs))):
            line = Text(no_wrap=True).append(f"{label if place == 0 else '':<{LABEL}}", style=theme.DIM)
            left = mine[place] if place < len(mine) else ""
            line.append(widgets.cells(left, column) if theirs else left, style=theme.PLAIN)
            if place < len(theirs):
                line.append("  " + widgets.cells(theirs[place], column), style=theme.PLAIN)
            line.rstrip()
            lines.append(line)
    lines += _cache_lines(step, width)
    return lines


def _cache_lines(step: Mapping[str, Any], width: int) -> list[Text]:
    """The cache after the pass: the shapes of each kind, and the rows that it was reordered from."""
    lines = []
    kinds: dict[str, list[str]] = {}
    for layer in step["layers"]:
        shapes = kinds.setdefault(layer["kind"], [])
        if str(layer["shape"]) not in shapes:
            shapes.append(str(layer["shape"]))
    for kind, shapes in kinds.items():
        words = ", ".join(shapes)
        if kind == "cross-attention":
            computed = step["cross_attention"] == "computed"
            words += ": computed in this pass" if computed else ": kept as it was"
            words += "" if computed or step["without_cache"] is None else "; without a cache computed again"
        lines += hanging(f"{kind:<{LABEL}}", words, width)
    if step["reordered"]:
        now = " ".join(str(row + 1) for row in range(len(step["reordered"])))
        words = f"{now} continue {' '.join(str(row + 1) for row in step['reordered'])}"
        if step["cross_attention"]:
            words += "; cross-attention was not reordered"
        lines += hanging(f"{'rows':<{LABEL}}", words, width)
    return lines


def _shown(name: str, value: Any, width: int) -> list[str]:
    """A field in lines of at most `width` cells."""
    if name == "past_length":
        return [str(value)]
    if value is None:
        return wrap("none: hides the future only" if name == "attention_mask" else "none: it takes none", width)
    if name == "cache_position":
        return [_numbers(value, width)] if value else wrap("none: a state has no positions", width)
    shape = f"[{len(value)}, {len(value[0])}]"
    lines = [f"{shape} {_numbers(row, width - len(shape) - 1)}" for row in value[:ROWS]]
    indent = " " * len(shape)
    lines = [lines[0], *(indent + line[len(shape) :] for line in lines[1:])]
    if len(value) > ROWS:
        lines.append(f"{indent} … and {len(value) - ROWS} more rows")
    return lines


def _numbers(values: Sequence[int], width: int) -> str:
    """Numbers in a line: a range where they count up, else the first and the last with … between them."""
    if len(values) > 2 and list(values) == list(range(values[0], values[0] + len(values))):
        return f"{values[0]} … {values[-1]}"
    words = [str(value) for value in values]
    whole = " ".join(words)
    if cell_len(whole) <= width or len(words) < 3:
        return widgets.cells(whole, width).rstrip() if cell_len(whole) > width else whole
    tail = f" … {words[-1]}"
    beginning = ""
    for word in words[:-1]:
        if len(beginning) + len(word) + 1 + len(tail) > width:
            break
        beginning = f"{beginning} {word}".strip()
    return beginning + tail

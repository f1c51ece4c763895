"""The input of each pass, with a cache and without one, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rich.style import Style
from rich.text import Text

from genctl.commands.inspect.measurement import CROSS
from genctl.commands.inspect.report import PIPE, Report, Step, shape_words
from genctl.errors import count
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import hanging, wrap

LABEL = 17  # cells
ROWS = 4  # rows of a batch that are shown
FIELDS = ("input_ids", "cache_position", "position_ids", "attention_mask", "past_length")


def input_lines(report: Report, width: int | None) -> list[Text]:
    """A block for each pass, in lines of at most `width` cells."""
    page = width or PIPE
    lines: list[Text] = []
    beside = any(step["without_cache"] is not None for step in report["steps"])
    column = (page - LABEL - 2) // 2 if beside else page - LABEL
    for step in report["steps"]:
        rows = len(step["input_ids"])
        what = "the prompt" if step["step"] == 0 else count(len(step["input_ids"][0]), "token")
        if "prompts" in report and step["step"] == 0:
            what = f"prompt {step['rows'][0] + 1}"
        lines.append(widgets.header(page, f"step {step['step']}", what, count(rows, "row") if rows > 1 else ""))
        if beside:
            heads = f"{'':{LABEL}}{'with the cache':{column}}  without a cache"
            lines.append(Text(heads, style=theme.DIM))
        for name in FIELDS:
            mine, theirs = _field(name, step[name], column), list[str]()
            if beside and name != "cache_position":
                other = step["without_cache"]
                theirs = ["–"] if other is None else _field(name, other.get(name), column)
            for label, left, right in zip_longest([name.replace("past_", "past ")], mine, theirs, fillvalue=""):
                line = Text(f"{label:<{LABEL}}", style=theme.DIM)
                line.append(
                    f"{widgets.cells(left, column)}  {widgets.cells(right, column)}".rstrip(), style=Style(dim=False)
                )
                lines.append(line)
        lines += _cache_after(step, page)
    if report.get("tokens_agree") is False:
        lines.append(Text("the tokens written without a cache are not the same", style=theme.ERROR))
    elif beside:
        lines.append(Text("with and without a cache the same tokens were written", style=theme.DIM))
    return lines


def _cache_after(step: Step, width: int) -> list[Text]:
    """The shapes of each kind of layer after a pass, and the rows that it was reordered from."""
    lines = []
    kinds: dict[str, dict[str, None]] = {}
    for layer in step["layers"]:
        kinds.setdefault(layer["kind"], {})[shape_words(layer)] = None
    for kind, shapes in kinds.items():
        words = ", ".join(shapes)
        if kind == CROSS and step["cross_attention"] == "computed":
            words += ": computed in this pass"
        elif kind == CROSS:
            words += ": unchanged" + ("; without a cache computed again" if step["without_cache"] else "")
        lines += hanging(f"{kind:<{LABEL}}", words, width)
    if step["reordered"]:
        now = " ".join(str(row + 1) for row in range(len(step["reordered"])))
        words = f"{now} continue {' '.join(str(row + 1) for row in step['reordered'])}"
        if step["cross_attention"]:
            words += "; cross-attention was not reordered"
        lines += hanging(f"{'rows':<{LABEL}}", words, width)
    return lines


def _field(name: str, value: Any, width: int) -> list[str]:
    """A field of a pass in lines of at most `width` cells."""
    if name == "past_length":
        return [str(value)]
    if value is None:
        return wrap("none: hides the future only" if name == "attention_mask" else "none: it takes none", width)
    if name == "cache_position":
        return [_numbers(value, width)] if value else wrap("none: a state has no positions", width)
    shape = f"[{len(value)}, {len(value[0])}]"
    heads = [shape, *[" " * len(shape)] * ROWS]
    lines = [f"{head} {_numbers(row, width - len(shape) - 1)}" for head, row in zip(heads, value[:ROWS], strict=False)]
    if len(value) > ROWS:
        lines.append(f"{heads[-1]} … and {len(value) - ROWS} more rows")
    return lines


def _numbers(values: Sequence[int], width: int) -> str:
    """Numbers in a line: a range where they count up, else as many as fit before … and the last one."""
    if len(values) > 2 and list(values) == list(range(values[0], values[0] + len(values))):
        return f"{values[0]} … {values[-1]}"
    words = [str(value) for value in values]
    shown = " ".join(words)
    while len(shown) > width and len(words) > 2:
        del words[-2]
        shown = f"{' '.join(words[:-1])} … {words[-1]}"
    return shown if len(shown) <= width else widgets.cells(shown, width)

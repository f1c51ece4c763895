"""A plan as text: its layers in the table of a measured cache, sums for each kind, and what fits into a memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from genctl.render import parts, theme
from genctl.render.cache import PIPE, count, fitted, layer_lines, number, share, size

Report: TypeAlias = Mapping[str, Any]

INDENT = 10  # cells of the words before each line of sums
NOT_COUNTED = "activations and the framework's own memory are not counted"


def plan_lines(report: Report, width: int | None) -> list[Text]:
    """The whole plan in lines of at most `width` cells; None: as wide as it takes."""
    made = report["plan"]
    rows = count(made["batch"], "prompt")
    if made["rows"] != made["batch"]:
        rows += f", {count(made['rows'], 'row')}"
    length = count(made["length"], "token")
    if made["source_length"] is not None:
        length += f", source {made['source_length']:,}"
    lines = [parts.header(width or PIPE, report["model"], "plan", rows, length), *layer_lines(report, width)]
    for name, words, style in (*_sums(report), *_fit(report)):
        lines += _entry(name, words, style, width)
    return [fitted(line, width) for line in lines]


def _sums(report: Report) -> list[tuple[str, list[str], Any]]:
    total, weights, made = report["total_bytes"], report["weights_bytes"], report["plan"]
    said = [_amount(total)]
    if made["rows"] > 1:
        said.append(f"{number(report['bytes_per_row'])} bytes for each of {made['rows']:,} rows")
    said.append(f"{number(report['bytes_per_token'])} bytes for each new token of each row")
    found: list[tuple[str, list[str], Any]] = [("cache", said, theme.PLAIN)]
    kinds: dict[str, int] = {}
    for layer in report["layers"]:
        kinds[layer["kind"]] = kinds.get(layer["kind"], 0) + layer["bytes"]
    if len(kinds) > 1:
        each = [
            f"{kind} {size(amount)}" + (f" ({share(amount / total)})" if total else "")
            for kind, amount in kinds.items()
        ]
        found.append(("", each, theme.PLAIN))
    said = [_amount(weights), made["dtype"]]
    if report["share_of_weights"]:
        said.append(f"the cache is {share(report['share_of_weights'])} of them")
    return [*found, ("weights", said, theme.PLAIN)]


def _fit(report: Report) -> list[tuple[str, list[str], Any]]:
    made = report["plan"]
    memory = made["memory_bytes"]
    if memory is None:
        return []
    weights = report["weights_bytes"]
    left = memory - weights - report["total_bytes"]
    if weights > memory:
        verdict = f"does not fit: the weights alone need {size(weights - memory)} more"
    elif left < 0:
        verdict = f"does not fit: {size(-left)} too little"
    else:
        verdict = f"fits, {size(left)} left"
    style = theme.PLAIN if made["fits"] else theme.ERROR
    found = [("memory", [_amount(memory), verdict], style)]
    rows = "" if made["rows"] == 1 else f" in {made['rows']:,} rows"
    if made["longest_length"] is None:
        longest = ["any length: nothing that is kept grows with it"]
    elif made["longest_length"] == 0:
        longest = ["not even one token"]
    else:
        longest = [f"{count(made['longest_length'], 'token')}{rows}"]
        if made["length_bound"] == "context":
            longest.append("the model's context")
    found.append(("longest", longest, theme.PLAIN))
    if made["largest_batch"] is None:
        most = "any number of prompts: nothing is kept of them"
    elif made["largest_batch"] == 0:
        most = f"not even one prompt of {count(made['length'], 'token')}"
    else:
        most = f"{count(made['largest_batch'], 'prompt')} of {count(made['length'], 'token')}"
    return [*found, ("largest", [most], theme.PLAIN), ("", [NOT_COUNTED], theme.DIM)]


def _amount(amount: int) -> str:
    return f"{amount:,} bytes" + (f" ({size(amount)})" if amount >= 1024 else "")


def _entry(name: str, words: list[str], style: Any, width: int | None) -> list[Text]:
    """A name and what is said of it, on as many lines as it takes; a phrase is broken only where it must be."""
    lines = [Text().append(f"{name:<{INDENT}}", style=theme.DIM)]
    for place, phrase in enumerate(words):
        if place and (width is None or lines[-1].cell_len + 3 + cell_len(phrase) <= width):
            lines[-1].append(" · ", style=theme.PLAIN)
        elif place:
            lines.append(Text(" " * INDENT))
        if width is None or lines[-1].cell_len + cell_len(phrase) <= width:
            lines[-1].append(phrase, style=style)
            continue
        page = Console(width=width, _environ={})  # it only breaks between words
        first, *rest = Text(phrase, style=style).wrap(page, max(width - INDENT, 8))
        lines[-1].append_text(first)
        lines += [Text(" " * INDENT).append_text(piece) for piece in rest]
    return lines

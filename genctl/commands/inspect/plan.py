"""`genctl inspect-cache --plan`: the memory that a cache will take, from a config alone."""

from __future__ import annotations

import sys
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from genctl.commands.inspect.cache_report import PIPE, Report, amount, layer_lines, number, share
from genctl.commands.inspect.options import InspectOptions
from genctl.commands.options import memory_bytes
from genctl.config.layers import Resolved
from genctl.errors import Exit, UsageError, count, size
from genctl.io.writers import report_text
from genctl.terminal import theme, widgets
from genctl.terminal.console import make_consoles
from genctl.terminal.widgets import visible

# A cache estimate as text: its layers, sums for each kind, and what fits into a memory.


INDENT = 10  # cells of the words before each line of sums
NOT_COUNTED = "activations and the framework's own memory are not counted"


def plan_lines(report: Report, width: int | None) -> list[Text]:
    """The whole estimate in lines of at most `width` cells; None leaves lines whole."""
    plan = report["plan"]
    rows = count(plan["batch"], "prompt")
    if plan["rows"] != plan["batch"]:
        rows += f", {count(plan['rows'], 'row')}"
    length = count(plan["length"], "token")
    if plan["source_length"] is not None:
        length += f", source {plan['source_length']:,}"
    lines = [widgets.header(width or PIPE, report["model"], "plan", rows, length), *layer_lines(report, width)]
    for name, words, style in (*_sums(report), *_fit(report)):
        lines += _entry(name, words, style, width)
    return [widgets.fit(line, width) for line in lines]


def _sums(report: Report) -> list[tuple[str, list[str], Any]]:
    total, weights, plan = report["total_bytes"], report["weights_bytes"], report["plan"]
    phrases = [amount(total)]
    if plan["rows"] > 1:
        phrases.append(f"{number(report['bytes_per_row'])} bytes for each of {plan['rows']:,} rows")
    phrases.append(f"{number(report['bytes_per_token'])} bytes for each new token of each row")
    entries: list[tuple[str, list[str], Any]] = [("cache", phrases, theme.PLAIN)]
    kinds: dict[str, int] = {}
    for layer in report["layers"]:
        kinds[layer["kind"]] = kinds.get(layer["kind"], 0) + layer["bytes"]
    if len(kinds) > 1:
        each = [
            f"{kind} {size(amount)}" + (f" ({share(amount / total)})" if total else "")
            for kind, amount in kinds.items()
        ]
        entries.append(("", each, theme.PLAIN))
    phrases = [amount(weights), plan["dtype"]]
    if report["share_of_weights"]:
        phrases.append(f"the cache is {share(report['share_of_weights'])} of them")
    return [*entries, ("weights", phrases, theme.PLAIN)]


def _fit(report: Report) -> list[tuple[str, list[str], Any]]:
    plan = report["plan"]
    memory = plan["memory_bytes"]
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
    style = theme.PLAIN if plan["fits"] else theme.ERROR
    entries = [("memory", [amount(memory), verdict], style)]
    rows = "" if plan["rows"] == 1 else f" in {plan['rows']:,} rows"
    if plan["longest_length"] is None:
        longest = ["any length: nothing that is kept grows with it"]
    elif plan["longest_length"] == 0:
        longest = ["not even one token"]
    else:
        longest = [f"{count(plan['longest_length'], 'token')}{rows}"]
        if plan["length_bound"] == "context":
            longest.append("the model's context")
    entries.append(("longest", longest, theme.PLAIN))
    if plan["largest_batch"] is None:
        most = "any number of prompts: nothing is kept of them"
    elif plan["largest_batch"] == 0:
        most = f"not even one prompt of {count(plan['length'], 'token')}"
    else:
        most = f"{count(plan['largest_batch'], 'prompt')} of {count(plan['length'], 'token')}"
    return [*entries, ("largest", [most], theme.PLAIN), ("", [NOT_COUNTED], theme.DIM)]


def _entry(name: str, words: list[str], style: Any, width: int | None) -> list[Text]:
    """A name and its phrases on as many lines as needed; a phrase is broken only if it is longer than a line."""
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


COLUMNS = ("layer", "kind", "shape", "dtype", "device", "bytes")


def perform(options: InspectOptions, early: Resolved) -> int:
    """Print the plan. Returns the exit status: 4 if --memory is given and too small for it, else 0.

    Raises UsageError and ModelError before anything is printed.
    """
    from genctl.commands.inspect import cache_estimate as plans

    if early.runtime.prompt_cache is not None and early.settings["prompt_cache"].kind == "command":
        raise UsageError("--prompt-cache belongs to a measurement, and --plan decodes nothing")
    report = plans.plan(
        early.runtime,
        early.generation,
        batch=options.batch or 1,
        length=options.length,
        source_length=options.source_length,
        memory=None if options.memory is None else memory_bytes(options.memory),
        **options.trust,
    )
    _write(report, options)
    return int(Exit.CHECK if report["plan"]["fits"] is False else Exit.DONE)


def _write(report: Report, options: InspectOptions) -> None:
    out, err = make_consoles(options.color)
    if options.format == "text":
        for line in plan_lines(report, out.width if out.is_terminal else None):
            out.print(line)
    else:
        rows = [[layer[name] for name in COLUMNS] for layer in report["layers"]]
        sys.stdout.write(report_text(report, options.format, COLUMNS, rows))
    sys.stdout.flush()
    for note in report["plan"]["notes"]:
        err.print(visible(f"note: {note}"), style="dim")

"""A report of `genctl inspect-cache` as text: tables of layers and passes, sums, a plan.

Everything is drawn from the JSON report, in lines of at most `width` cells; where that is None, lines stay whole.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any, TypeAlias

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from genctl.commands.inspect.measurement import STATE
from genctl.errors import count, percent, size
from genctl.terminal import theme, widgets
from genctl.terminal.summary import DOT
from genctl.terminal.summary import lines as lines_of_items
from genctl.terminal.text_width import hanging

Report: TypeAlias = Mapping[str, Any]
Layer: TypeAlias = Mapping[str, Any]
Step: TypeAlias = Mapping[str, Any]

MOST = 24  # with more lines of layers, equal layers share a line even if others lie between them
PIPE = 120  # cells of a rule where there is no terminal
LABEL = 10  # cells
NOT_COUNTED = "activations and the framework's own memory are not counted"


def report_lines(report: Report, width: int | None) -> list[Text]:
    """A measurement: its prompts, layers, sums and passes."""
    page = width or PIPE
    if "prompts" in report:
        lines = [widgets.header(page, report["model"], count(len(report["prompts"]), "prompt"))]
        rows = [
            [
                str(place),
                count(prompt["prompt_tokens"], "token"),
                prompt["strategy"],
                ended_words(prompt["ended"]),
                widgets.first_words(prompt["prompt"], 40),
            ]
            for place, prompt in enumerate(report["prompts"], 1)
        ]
        lines += table(["prompt", "read", "strategy", "ended", "text"], rows, width, right={0})
    else:
        read = count(report["prompt_tokens"], "token")
        if report["reused_tokens"]:
            read += f", {report['reused_tokens']} reused"
        lines = [widgets.header(page, report["model"], report["prompt"], read, report["strategy"])]
    lines += [*layer_lines(report, width), *_sums(report, width), Text(), *_passes(report, width)]
    return [widgets.fit(line, width) for line in lines]


def plan_lines(report: Report, width: int | None) -> list[Text]:
    """A plan: layers, sums for each kind of layer, and what fits into the memory."""
    plan, total, weights = report["plan"], report["total_bytes"], report["weights_bytes"]
    rows = count(plan["batch"], "prompt")
    if plan["rows"] != plan["batch"]:
        rows += f", {count(plan['rows'], 'row')}"
    length = count(plan["length"], "token")
    if plan["source_length"] is not None:
        length += f", source {plan['source_length']:,}"
    lines = [widgets.header(width or PIPE, report["model"], "plan", rows, length), *layer_lines(report, width)]

    phrases = [amount(total)]
    if plan["rows"] > 1:
        phrases.append(f"{number(report['bytes_per_row'])} bytes for each of {plan['rows']:,} rows")
    phrases.append(f"{number(report['bytes_per_token'])} bytes for each new token of each row")
    lines += labelled("cache", phrases, width)
    kinds: dict[str, int] = {}
    for layer in report["layers"]:
        kinds[layer["kind"]] = kinds.get(layer["kind"], 0) + layer["bytes"]
    if len(kinds) > 1:
        shares = {kind: f" ({share(held / total)})" if total else "" for kind, held in kinds.items()}
        lines += labelled("", [f"{kind} {size(held)}{shares[kind]}" for kind, held in kinds.items()], width)
    phrases = [amount(weights), plan["dtype"]]
    if report["share_of_weights"]:
        phrases.append(f"the cache is {share(report['share_of_weights'])} of them")
    lines += labelled("weights", phrases, width)
    if plan["memory_bytes"] is not None:
        lines += _what_fits(plan, plan["memory_bytes"] - weights, total, width)
    return [widgets.fit(line, width) for line in lines]


def _what_fits(plan: Report, room: int, total: int, width: int | None) -> list[Text]:
    """`room` are the bytes beside the weights, `total` those of the cache."""
    length, rows = count(plan["length"], "token"), "" if plan["rows"] == 1 else f" in {plan['rows']:,} rows"
    verdict = f"fits, {size(max(room - total, 0))} left"
    if room < 0:
        verdict = f"does not fit: the weights alone need {size(-room)} more"
    elif room < total:
        verdict = f"does not fit: {size(total - room)} too little"
    if plan["longest_length"] is None:
        longest = "any length: the cache does not grow"
    else:
        longest = f"{count(plan['longest_length'], 'token')}{rows}" if plan["longest_length"] else "not even one token"
    if plan["largest_batch"] is None:
        most = "any number of prompts: nothing is cached"
    else:
        prompts = count(plan["largest_batch"], "prompt")
        most = f"{prompts} of {length}" if plan["largest_batch"] else f"not even one prompt of {length}"
    style = theme.PLAIN if plan["fits"] else theme.ERROR
    context = ["the model's context"] if plan["length_bound"] == "context" else []
    return [
        *labelled("memory", [amount(plan["memory_bytes"]), verdict], width, style),
        *labelled("longest", [longest, *context], width),
        *labelled("largest", [most], width),
        *labelled("", [NOT_COUNTED], width, theme.DIM),
    ]


# -- layers, sums and passes -------------------------------------------------------------------------------------------


def layer_lines(report: Report, width: int | None) -> list[Text]:
    """A line for each group of equal layers."""
    groups = grouped(report["layers"])
    if not groups:
        return [Text("nothing is cached: every step reads the whole text again", style=theme.DIM)]
    rows, notes = [], []
    for group in groups:
        layer = group[0]
        cells = [layer["kind"], shape_words(layer), layer["dtype"], layer["device"]]
        rows.append([label_of(group), *cells, f"{sum(one['bytes'] for one in group):,}"])
        note = [f"{len(group)} × {layer['bytes']:,}"] if len(group) > 1 else []
        if "window" in layer:
            note.append(f"window {layer['window']}")
        if "filled" in layer:
            note.append(f"{layer['filled']} of {layer['shape'][2]} filled")
        if "shared" in layer:
            note.append(f"{layer['shared']} columns stored once for all rows")
        if "value_shape" in layer:
            note.append(f"values {shape_words(layer, layer['value_shape'])}")
        if "states" in layer:
            note.append(" + ".join(f"{name} {shape_words(layer, shape)}" for name, shape in layer["states"].items()))
        notes.append(", ".join(note))
    heads = ["layer", "kind", "shape", "dtype", "device", "bytes"]
    columns = [[head, *cells] for head, *cells in zip(heads, *rows, strict=True)]
    if width is not None and sum(max(map(cell_len, column)) + 2 for column in columns) > width + 2:
        notes = ["\n".join(filter(None, (row.pop(2), note))) for row, note in zip(rows, notes, strict=True)]
        del heads[2]
    return table(heads, rows, width, right={len(heads) - 1}, notes=notes, shrinks=1)


def shape_words(layer: Layer, shape: Sequence[int] | None = None) -> str:
    """The shape of a layer's keys, or another one of it, with the names of the dimensions; of a state the batch's."""
    shape = layer["shape"] if shape is None else shape
    names = ("batch",) if layer["kind"] == STATE else ("batch", "heads", "tokens", "head_dim")
    words = [f"{name} {length}" for name, length in zip(names, shape, strict=False)]
    return f"[{', '.join([*words, *map(str, shape[len(names) :])])}]"


def grouped(layers: Sequence[Layer], most: int = MOST) -> list[list[Layer]]:
    """Layers that differ in nothing but their number: neighbours, or all if there would be more than `most` groups."""

    def content(layer: Layer) -> str:
        return repr({**layer, "layer": 0})

    groups = [list(same) for _, same in groupby(layers, key=content)]
    if len(groups) <= most:
        return groups
    equal: dict[str, list[Layer]] = {}
    for layer in layers:
        equal.setdefault(content(layer), []).append(layer)
    return list(equal.values())


def label_of(group: Sequence[Layer]) -> str:
    """The numbers of layers: `7`, `0-11`, or `0,2…46` if others lie between."""
    numbers = [layer["layer"] for layer in group]
    first, last = numbers[0], numbers[-1]
    if len(group) == 1:
        return str(first)
    if last - first + 1 == len(group):
        return f"{first}-{last}"
    return f"{first},{numbers[1]}…{last}" if len(group) > 2 else f"{first},{last}"


def _sums(report: Report, width: int | None) -> list[Text]:
    """Totals: the cache, its share of the weights, bytes per row and per token."""
    total, steps = report["total_bytes"], report["steps"]
    rows = sum(len(step["input_ids"]) for step in steps if step["step"] == steps[-1]["step"])
    phrases = [amount(total)]
    if rows > 1:
        phrases.append(f"{number(report['bytes_per_row'])} bytes for each of {rows} rows")
    if report["share_of_weights"] is not None:
        phrases.append(f"{share(report['share_of_weights'])} of the weights ({size(report['weights_bytes'])})")
    lines = labelled("total", phrases, width)
    if report["reserved_bytes"] > total:
        lines += labelled("reserved", [f"{report['reserved_bytes']:,} bytes, room for later tokens included"], width)
    if report["bytes_per_token"] is not None:
        growth = number(report["bytes_per_token"])
        lines += labelled("growth", [f"{growth} bytes for each new token of each row"], width)
    if "ended" in report:
        lines += labelled("ended", [ended_words(report["ended"]).removeprefix("ended ")], width)
    return lines


def _passes(report: Report, width: int | None) -> list[Text]:
    """A line for each pass, or for several that differ only in their place: its input, the cache after it, growth."""
    runs: list[list[Step]] = []
    for step in report["steps"]:
        if runs and _continues(runs[-1][-1], step):
            runs[-1].append(step)
        else:
            runs.append([step])

    def range_of(run: Sequence[Step], name: str) -> str:
        low, high = run[0][name], run[-1][name]
        return f"{low:,}" if low == high else f"{low:,} … {high:,}"

    rows, notes = [], []
    for run in runs:
        first, last = run[0], run[-1]
        fed, ids = len(first["input_ids"]), len(first["input_ids"][0])
        label = str(first["step"]) if len(run) == 1 else f"{first['step']}-{last['step']}"
        given = (f"{fed} × " if fed > 1 else "") + count(ids, "token")
        cells = [range_of(run, "past_length"), range_of(run, "total_bytes"), f"{first['growth_bytes']:+,}"]
        rows.append([label, given, *cells])
        notes.append(_pass_note(first, "prompts" in report))
    return table(["step", "given", "past", "bytes after", "growth"], rows, width, right={0, 2, 3, 4}, notes=notes)


def _continues(before: Step, step: Step) -> bool:
    """Whether a pass differs from the one before only in its place, so that one line shows both."""
    return (
        before["step"] > 0
        and step["step"] == before["step"] + 1
        and not step["reordered"]
        and not before["reordered"]
        and all(before[name] == step[name] for name in ("rows", "growth_bytes", "cross_attention"))
        and len(before["input_ids"][0]) == len(step["input_ids"][0])
    )


def _pass_note(step: Step, several_prompts: bool) -> str:
    """The prompts of a pass, the reordering of rows, and the state of cross-attention."""
    notes = []
    if several_prompts and not step["reordered"]:
        prompts = sorted({row + 1 for row in step["rows"]})
        notes.append(f"prompt{'s' * (len(prompts) > 1)} " + " ".join(map(str, prompts)))
    if step["reordered"]:
        notes.append("rows ← " + " ".join(str(row + 1) for row in step["reordered"]))
    if step["cross_attention"]:
        notes.append("cross-attention computed" if step["cross_attention"] == "computed" else "cross kept")
    return ", ".join(notes)


def ended_words(ended: Mapping[str, Any] | None) -> str:
    """Why decoding ended, and when."""
    if ended is None:
        return "not ended"
    steps, reason, stop = count(ended["steps"], "step"), ended["reason"], widgets.visible(ended.get("stop") or "")
    if reason == "steps":
        every = "" if ended["steps"] == 1 else "all "
        return f"ended after {every}{steps}" if ended["steps"] else "ended after the prefill"
    if reason in ("length", "context"):
        return f"ended after {steps}" + (f" by the {stop}" if stop else ": all tokens were written")
    words = {"interrupted": "interrupted", "stop": f"ended by stop {stop or reason}"}.get(reason, f"ended by {reason}")
    return f"{words} after {steps}"


# -- lines -------------------------------------------------------------------------------------------------------------


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    right: set[int],
    notes: Sequence[str] = (),
    shrinks: int | None = None,
) -> list[Text]:
    """Columns two cells apart, those in `right` right-aligned; where they do not fit, column `shrinks` is cut.

    The note of a row stands beside it if all notes fit there, else below it.
    """
    every = [list(headings), *(list(map(widgets.visible, row)) for row in rows)]
    sizes = [max(map(cell_len, column)) for column in zip(*every, strict=True)]
    excess = sum(sizes) + 2 * (len(sizes) - 1) - (width or PIPE)
    if width is not None and shrinks is not None and excess > 0:
        sizes[shrinks] = max(sizes[shrinks] - excess, min(8, sizes[shrinks]))
    used = sum(sizes) + 2 * len(sizes)
    beside = width is None or used + max(map(cell_len, notes), default=0) <= width
    lines: list[Text] = []
    for cells, note in zip_longest(every, ["", *notes], fillvalue=""):
        shown = "  ".join(
            cell.rjust(sizes[place]) if place in right else widgets.cells(cell, sizes[place])
            for place, cell in enumerate(cells)
        )
        lines.append(Text(shown.rstrip(), style=theme.PLAIN if lines else theme.DIM, no_wrap=True))
        if note and beside:
            lines[-1].append(" " * (used - lines[-1].cell_len) + note, style=theme.DIM)
        elif note:
            lines += hanging(" " * 8, note, width, theme.DIM)
    return lines


def labelled(label: str, phrases: Sequence[str], width: int | None, style: Style = theme.PLAIN) -> list[Text]:
    """A label and phrases, on as many lines as needed; a phrase is broken only if it is longer than a line."""
    rows = lines_of_items(Text(DOT.join(phrases)), sys.maxsize if width is None else width - LABEL)
    return hanging(f"{label:<{LABEL}}", "\n".join(row.plain for row in rows), width, style)


def amount(total: int) -> str:
    """Bytes as a number, and as people say it."""
    return f"{total:,} bytes" + (f" ({size(total)})" if total >= 1024 else "")


def share(part: float) -> str:
    """A share as a percentage; a small one has two significant digits."""
    return percent(part, significant=2 if part < 0.1 else 0)


def number(value: float | None) -> str:
    """Bytes with thousands separators; no part of a byte."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == int(value) else f"about {value:,.0f}"


# -- the cache in the page of --report ---------------------------------------------------------------------------------


def cache_part(report: Report) -> dict[str, Any]:
    """What a page shows: the layers of each pass. Inputs are left out."""
    names = ("model", "cache", "layers", "total_bytes", "reserved_bytes", "weights_bytes", "bytes_per_token")
    steps = [{name: step[name] for name in ("step", "total_bytes", "layers")} for step in report["steps"]]
    return {name: report[name] for name in names} | {"steps": steps}

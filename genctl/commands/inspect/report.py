"""A report of `genctl inspect-cache` as text: tables of layers and passes, sums, inputs, a plan.

Everything is made from the JSON report, in lines of at most `width` cells; if that is None, lines are not broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

from rich.table import Table
from rich.text import Text

from genctl.commands.inspect.measurement import CROSS, STATE
from genctl.errors import count, percent, size
from genctl.terminal import theme, widgets
from genctl.terminal.run_history import DOT

Report: TypeAlias = Mapping[str, Any]  # or a pass of it, or a layer

WHOLE = 1 << 16  # cells of a line that is not broken
PIPE = 120  # cells of a rule, and of inputs, without a terminal
ROWS = 4  # rows of a batch whose input is shown
NUMBERS = ("step", "past", "bytes", "bytes after", "growth")  # columns that are right-aligned and never broken
INPUTS = ("input_ids", "cache_position", "position_ids", "attention_mask", "past_length")


def report_lines(report: Report, width: int | None) -> list[Text]:
    """A measurement: its prompts, layers, sums and passes."""
    prompts: list[tuple[str, ...]] = []
    if "prompts" in report:
        head = [count(len(report["prompts"]), "prompt")]
        for place, prompt in enumerate(report["prompts"], 1):
            read, text = count(prompt["prompt_tokens"], "token"), widgets.first_words(prompt["prompt"], 40)
            prompts.append((f"prompt {place}", text, read, prompt["strategy"], ended_words(prompt["ended"])))
    else:
        reused = f", {report['reused_tokens']} reused" if report["reused_tokens"] else ""
        head = [report["prompt"], count(report["prompt_tokens"], "token") + reused, report["strategy"]]
    steps = report["steps"]
    facts = _sums("total", report, sum(len(step["input_ids"]) for step in steps if step["step"] == steps[-1]["step"]))
    if "ended" in report:
        facts.append(("ended", ended_words(report["ended"]).removeprefix("ended ")))
    passes = table(("step", "given", "past", "bytes after", "growth", ""), map(_pass_cells, steps), width)
    header = widgets.header(width or PIPE, report["model"], *head)
    return [header, *labelled(prompts, width), *layer_lines(report, width), *labelled(facts, width), Text(), *passes]


def plan_lines(report: Report, width: int | None) -> list[Text]:
    """A plan: layers, sums, and what fits into memory."""
    plan = report["plan"]
    source = f", source {plan['source_length']:,}" if plan["source_length"] is not None else ""
    length = count(plan["length"], "token")
    header = widgets.header(width or PIPE, report["model"], "plan", count(plan["batch"], "prompt"), length + source)
    facts = [*_sums("cache", report, plan["rows"]), ("weights", amount(report["weights_bytes"]), plan["dtype"])]
    if plan["memory_bytes"] is not None:
        facts += _what_fits(plan, plan["memory_bytes"] - report["weights_bytes"], report["total_bytes"])
    return [header, *layer_lines(report, width), *labelled(facts, width)]


def _sums(label: str, report: Report, rows: int) -> list[tuple[str, ...]]:
    """The bytes of the cache, over all layers."""
    total = report["total_bytes"]
    sums = [amount(total)]
    if rows > 1:
        sums.append(f"{number(report['bytes_per_row'])} bytes for each of {rows:,} rows")
    if (share := report["share_of_weights"]) is not None:
        shown = percent(share, significant=2 if share < 0.1 else 0)
        sums.append(f"{shown} of the weights ({size(report['weights_bytes'])})")
    facts: list[tuple[str, ...]] = [(label, *sums)]
    if report["reserved_bytes"] > total:
        facts.append(("reserved", f"{report['reserved_bytes']:,} bytes, room for later tokens included"))
    if report["bytes_per_token"] is not None:
        facts.append(("growth", f"{number(report['bytes_per_token'])} bytes for each new token of each row"))
    return facts


def _what_fits(plan: Report, room: int, total: int) -> list[tuple[str, ...]]:
    """The largest batch and length that fit. `room`: bytes left beside the weights, `total`: bytes of the cache."""
    verdict = f"fits, {size(max(room - total, 0))} left"
    if room < 0:
        verdict = f"does not fit: the weights alone need {size(-room)} more"
    elif room < total:
        verdict = f"does not fit: {size(total - room)} too little"
    longest, batch, rows = plan["longest_length"], plan["largest_batch"], plan["rows"]
    length = "any length" if longest is None else count(longest, "token") + (f" in {rows:,} rows" if rows > 1 else "")
    bound = ("the model's context",) if plan["length_bound"] == "context" else ()
    prompts = "any number of prompts" if batch is None else count(batch, "prompt")
    return [
        ("memory", amount(plan["memory_bytes"]), verdict),
        ("longest", length, *bound),
        ("largest", f"{prompts} of {count(plan['length'], 'token')}"),
        ("", "activations and the framework's own memory are not counted"),
    ]


def input_lines(report: Report, width: int | None) -> list[Text]:
    """The input of each pass, with a cache and without one side by side, and the shapes of the cache after it."""
    page, lines = width or PIPE, list[Text]()
    for step in report["steps"]:
        rows, fed = len(step["input_ids"]), count(len(step["input_ids"][0]), "token")
        lines.append(widgets.header(page, f"step {step['step']}", fed, count(rows, "row") if rows > 1 else ""))
        passes = [one for one in (step, step["without_cache"]) if one is not None]
        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=theme.DIM, expand=True)
        grid.add_column("", style=theme.DIM, width=15)
        for heading in ("with the cache", "without a cache")[: len(passes)]:
            grid.add_column(heading if len(passes) > 1 else "", ratio=1, no_wrap=True, overflow="ellipsis")
        for name in INPUTS:
            grid.add_row(name.replace("past_", "past "), *(Text(_field(one[name])) for one in passes if name in one))
        shapes = dict.fromkeys((layer["kind"], shape_words(layer)) for layer in step["layers"])
        lines += [*widgets.lines_of(grid, page), *labelled(list(shapes), page, cells=16)]
    if (agree := report.get("tokens_agree")) is not None:
        differ = "the tokens written without a cache are not the same"
        words = "with and without a cache the same tokens were written" if agree else differ
        lines.append(Text(words, style=theme.DIM if agree else theme.ERROR))
    return lines


def _field(value: Any) -> str:
    """A field of a pass; for a batch its shape and its first rows."""
    if not isinstance(value, list):
        return "none" if value is None else str(value)
    if not value or not isinstance(value[0], list):
        return _numbers(value) or "none"
    shape = f"[{len(value)}, {len(value[0])}] "
    more = [f"… and {len(value) - ROWS} more rows"] if len(value) > ROWS else []
    return shape + f"\n{' ' * len(shape)}".join([*map(_numbers, value[:ROWS]), *more])


def _numbers(values: Sequence[int]) -> str:
    """Numbers in a line; as a range if they are consecutive."""
    if len(values) > 2 and list(values) == list(range(values[0], values[0] + len(values))):
        return f"{values[0]} … {values[-1]}"
    return " ".join(map(str, values))


def layer_lines(report: Report, width: int | None) -> list[Text]:
    """A line for each group of equal consecutive layers."""
    rows = []
    for _, equal in groupby(report["layers"], key=lambda layer: {**layer, "layer": 0}):
        group = list(equal)
        layer, last = group[0], group[-1]["layer"]
        notes = [shape_words(layer)]
        if len(group) > 1:
            notes.append(f"{len(group)} × {layer['bytes']:,}")
        if "window" in layer:
            notes.append(f"window {layer['window']}")
        if "filled" in layer:
            notes.append(f"{layer['filled']} of {layer['shape'][2]} filled")
        if "shared" in layer:
            notes.append(f"{layer['shared']} columns stored once for all rows")
        shapes = {"values": layer["value_shape"]} if "value_shape" in layer else layer.get("states", {})
        notes += [f"{name} {shape_words(layer, shape)}" for name, shape in shapes.items()]
        label = str(last) if len(group) == 1 else f"{layer['layer']}-{last}"
        held = f"{sum(one['bytes'] for one in group):,}"
        rows.append([label, layer["kind"], layer["dtype"], layer["device"], held, ", ".join(notes)])
    if not rows:
        return [Text("nothing is cached: every step reads the whole text again", style=theme.DIM)]
    return table(("layer", "kind", "dtype", "device", "bytes", "shape"), rows, width)


def shape_words(layer: Report, shape: Sequence[int] | None = None) -> str:
    """The shape of a layer's keys (or `shape`), with names of the dimensions; for a state only the batch's."""
    shape = layer["shape"] if shape is None else shape
    names = ("batch",) if layer["kind"] == STATE else ("batch", "heads", "tokens", "head_dim")
    words = [f"{name} {length}" for name, length in zip(names, shape, strict=False)]
    return f"[{', '.join([*words, *map(str, shape[len(names) :])])}]"


def _pass_cells(step: Report) -> list[str]:
    """The cells of a pass: its input, the cache after it, growth; its prompts, reordered rows and cross-attention."""
    fed, tokens = len(step["input_ids"]), count(len(step["input_ids"][0]), "token")
    given = f"{fed} × {tokens}" if fed > 1 else tokens
    sizes = [f"{step['past_length']:,}", f"{step['total_bytes']:,}", f"{step['growth_bytes']:+,}"]
    notes, prompts = [], sorted({row + 1 for row in step["rows"]})
    if prompts != [1]:
        notes.append(f"prompt{'s' * (len(prompts) > 1)} {' '.join(map(str, prompts))}")
    if step["reordered"]:
        notes.append("rows ← " + " ".join(str(row + 1) for row in step["reordered"]))
    if step["cross_attention"]:
        notes.append(f"{CROSS} {step['cross_attention']}")
    return [str(step["step"]), given, *sizes, ", ".join(notes)]


def ended_words(ended: Mapping[str, Any] | None) -> str:
    """Why decoding ended, and when."""
    if ended is None:
        return "not ended"
    reason, stop, steps = ended["reason"], widgets.visible(ended.get("stop") or ""), count(ended["steps"], "step")
    if reason == "steps":
        return f"ended after {'all ' if ended['steps'] > 1 else ''}{steps}"
    if reason in ("length", "context"):
        return f"ended after {steps}" + (f" by the {stop}" if stop else ": all tokens were written")
    return f"{'interrupted' if reason == 'interrupted' else f'ended by {reason} {stop}'.rstrip()} after {steps}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], width: int | None) -> list[Text]:
    """Columns two cells apart."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=theme.DIM)
    for heading in headings:
        number = heading in NUMBERS
        grid.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(widgets.visible(cell)) for cell in row))
    return widgets.lines_of(grid, width or WHOLE)


def labelled(facts: Sequence[Sequence[str]], width: int | None, cells: int = 9) -> list[Text]:
    """Lines of a dimmed label of `cells` cells and phrases, broken between words."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style=theme.DIM, min_width=cells)
    for label, *phrases in facts:
        grid.add_row(label, Text(DOT.join(phrases)))
    return widgets.lines_of(grid, width or WHOLE)


def amount(total: int) -> str:
    """Bytes as a number, and in a readable unit."""
    return f"{total:,} bytes" + (f" ({size(total)})" if total >= 1024 else "")


def number(value: float) -> str:
    """Bytes with thousands separators, as a whole number."""
    return f"{value:,.0f}" if value == int(value) else f"about {value:,.0f}"


def cache_part(report: Report) -> dict[str, Any]:
    """The part of a report for the page of --report: the layers of each pass, without inputs."""
    names = ("model", "cache", "layers", "total_bytes", "reserved_bytes", "weights_bytes", "bytes_per_token")
    steps = [{name: step[name] for name in ("step", "total_bytes", "layers")} for step in report["steps"]]
    return {name: report[name] for name in names} | {"steps": steps}

"""A measured cache as text: a table of layers, sums, and the growth from pass to pass.

Everything is drawn from the JSON report of `genctl inspect-cache`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, TypeAlias

from rich.cells import cell_len
from rich.text import Text

from genctl.errors import count, percent, size
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import wrap

Report: TypeAlias = Mapping[str, Any]
Layer: TypeAlias = Mapping[str, Any]

MOST = 24  # with more lines of layers, equal layers share a line even if others lie between them
WIDE = 118  # columns from which on the share of each line is drawn as a bar
PIPE = 120  # columns of a rule where nobody says how wide the page is


@dataclass(frozen=True)
class Group:
    """Layers that differ in nothing but their number."""

    numbers: tuple[int, ...]
    layer: Layer

    @property
    def label(self) -> str:
        """`7`, `0-11`, or `0,2…46` if others lie between."""
        first, last = self.numbers[0], self.numbers[-1]
        if len(self.numbers) == 1:
            return str(first)
        if all(b == a + 1 for a, b in pairwise(self.numbers)):
            return f"{first}-{last}"
        return f"{first},{self.numbers[1]}…{last}" if len(self.numbers) > 2 else f"{first},{last}"

    @property
    def bytes(self) -> int:
        """Bytes of all layers of the group."""
        return int(self.layer["bytes"]) * len(self.numbers)


def grouped(layers: Sequence[Layer], most: int = MOST) -> list[Group]:
    """Group equal neighbours; group all equal layers if there would be more than `most` lines."""
    groups: list[Group] = []
    for layer in layers:
        last = groups[-1] if groups else None
        if last is not None and last.numbers[-1] + 1 == layer["layer"] and _alike(last.layer, layer):
            groups[-1] = Group((*last.numbers, layer["layer"]), last.layer)
        else:
            groups.append(Group((layer["layer"],), layer))
    if len(groups) <= most:
        return groups
    together: list[Group] = []
    for group in groups:
        place = next((i for i, other in enumerate(together) if _alike(other.layer, group.layer)), None)
        if place is None:
            together.append(group)
        else:
            together[place] = Group((*together[place].numbers, *group.numbers), group.layer)
    return together


def _alike(one: Layer, other: Layer) -> bool:
    return {**one, "layer": 0} == {**other, "layer": 0}


def report_lines(report: Report, width: int | None) -> list[Text]:
    """The whole report in lines of at most `width` cells; None leaves lines whole."""
    lines = heading_lines(report, width)
    lines += layer_lines(report, width)
    lines += sum_lines(report, width)
    lines += [Text(), *pass_lines(report, width)]
    return [widgets.fit(line, width) for line in lines]


def heading_lines(report: Report, width: int | None) -> list[Text]:
    """A rule, and a line for each prompt if there are several."""
    page = width or PIPE
    if "prompts" not in report:
        read = count(report["prompt_tokens"], "token")
        if report["reused_tokens"]:
            read += f", {report['reused_tokens']} reused"
        return [widgets.header(page, report["model"], report["prompt"], read, report["strategy"])]
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
    return [*lines, *table(["prompt", "read", "strategy", "ended", "text"], rows, right={0})]


def layer_lines(report: Report, width: int | None) -> list[Text]:
    """A line for each group of equal layers."""
    groups = grouped(report["layers"])
    if not groups:
        return [Text("nothing is kept: everything is read again at every step", style=theme.DIM)]
    total = report["total_bytes"]
    rows, details, bars = [], [], []
    for group in groups:
        layer = group.layer
        rows.append(
            [group.label, layer["kind"], str(layer["shape"]), layer["dtype"], layer["device"], f"{group.bytes:,}"]
        )
        details.append(", ".join(layer_details(group)))
        bars.append(group.bytes / total if total else 0.0)
    heads = ["layer", "kind", "shape", "dtype", "device", "bytes"]
    table_lines = table(heads, rows, right={5})
    used = max(line.cell_len for line in table_lines)
    if width is not None and used > width:  # cut the kind, which stays recognisable
        kind = max(8, max(cell_len(row[1]) for row in rows) - (used - width))
        for row in rows:
            row[1] = row[1] if cell_len(row[1]) <= kind else widgets.cells(row[1], kind)
        table_lines = table(heads, rows, right={5})
        used = max(line.cell_len for line in table_lines)
    if width is not None and width >= WIDE:
        table_lines[0].append(" " * (used - table_lines[0].cell_len) + "  share of the cache", style=theme.DIM)
        for line, share in zip(table_lines[1:], bars, strict=True):
            line.append(" " * (used - line.cell_len + 2)).append_text(widgets.bar(share, 12))
            line.append(f" {widgets.percent(share)}")
        used = max(line.cell_len for line in table_lines)
    if not any(details):
        return table_lines
    beside = width is None or used + 2 + max(map(cell_len, details)) <= width
    lines = [table_lines[0]]
    for line, detail in zip(table_lines[1:], details, strict=True):
        lines.append(line)
        if detail and beside:
            line.append(" " * (used - line.cell_len + 2) + detail, style=theme.DIM)
        elif detail:
            lines.append(Text(f"{'':8}{detail}", style=theme.DIM))
    return lines


def layer_details(group: Group) -> list[str]:
    """Further words on a layer: window, filled columns, shapes that differ."""
    layer = group.layer
    details = []
    if len(group.numbers) > 1:
        details.append(f"{len(group.numbers)} × {layer['bytes']:,}")
    if "window" in layer:
        details.append(f"window {layer['window']}")
    if "filled" in layer:
        details.append(f"{layer['filled']} of {layer['shape'][2]} filled")
    if "shared" in layer:
        details.append(f"{layer['shared']} columns stored once for all rows")
    if "value_shape" in layer:
        details.append(f"values {layer['value_shape']}")
    if "states" in layer:
        details.append(" + ".join(f"{name} {shape}" for name, shape in layer["states"].items()))
    return details


def sum_lines(report: Report, width: int | None) -> list[Text]:
    """Totals: the cache, its share of the weights, bytes per row and per token."""
    total, reserved, weights = report["total_bytes"], report["reserved_bytes"], report["weights_bytes"]
    last = report["steps"][-1] if report["steps"] else None
    rows = sum(len(step["input_ids"]) for step in report["steps"] if last and step["step"] == last["step"])
    paragraphs = [[("total", amount(total))]]
    if rows > 1:
        paragraphs[0].append(("", f"{number(report['bytes_per_row'])} bytes for each of {rows} rows"))
    if report["share_of_weights"] is not None:
        paragraphs[0].append(("", f"{share(report['share_of_weights'])} of the weights ({size(weights)})"))
    if reserved > total:
        paragraphs.append([("reserved", f"{reserved:,} bytes, room for later tokens included")])
    if report["bytes_per_token"] is not None:
        paragraphs.append([("growth", f"{number(report['bytes_per_token'])} bytes for each new token of each row")])
    if "ended" in report:
        paragraphs.append([("ended", ended_words(report["ended"]).removeprefix("ended "))])
    lines = []
    for items in paragraphs:
        line = Text().append(f"{items[0][0]:<10}", style=theme.DIM)
        for place, (_, words) in enumerate(items):
            if place and width is not None and line.cell_len + 3 + cell_len(words) > width:
                lines.append(line)
                line = Text(" " * 10)
            elif place:
                line.append(" · ")
            line.append(words, style=theme.PLAIN)
        lines.append(line)
    return lines


def pass_lines(report: Report, width: int | None = None) -> list[Text]:
    """A line for each pass: its input, the cache after it, and the growth. Notes that do not fit go below it."""
    many = "prompts" in report
    rows, said = [], []
    for _, same in groupby(enumerate(report["steps"]), key=_pass_key(report["steps"])):
        members = [step for _, step in same]
        first, last = members[0], members[-1]
        label = str(first["step"]) if len(members) == 1 else f"{first['step']}-{last['step']}"
        cells = [label, _given(first), _range(first["past_length"], last["past_length"])]
        cells += [_range(first["total_bytes"], last["total_bytes"]), f"{first['growth_bytes']:+,}"]
        rows.append(cells)
        said.append(pass_note(first, many))
    heads, *lines = table(["step", "given", "past", "bytes after", "growth"], rows, right={0, 2, 3, 4})
    used = max(line.cell_len for line in lines) if lines else 0
    beside = width is None or used + 2 + max(map(cell_len, said), default=0) <= width
    shown = [heads]
    for line, note in zip(lines, said, strict=True):
        shown.append(line)
        if note and beside:
            line.append(" " * (used - line.cell_len + 2) + note)
        elif note:
            shown += [Text(f"{'':6}{part.rstrip()}", style=theme.DIM) for part in wrap(note, max(width or 0, 14) - 6)]
    return shown


def _pass_key(steps: Sequence[Mapping[str, Any]]) -> Any:
    """Key that groups consecutive passes with the same cells."""

    def key(item: tuple[int, Mapping[str, Any]]) -> Any:
        place, step = item
        before = steps[place - 1] if place else None
        same = before is not None and _same(before, step)
        if not same:
            starts.append(place)
        return starts[-1]

    starts: list[int] = []
    return key


def _same(before: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    return (
        before["step"] > 0
        and step["step"] == before["step"] + 1
        and not step["reordered"]
        and not before["reordered"]
        and all(before[name] == step[name] for name in ("rows", "growth_bytes", "cross_attention"))
        and len(before["input_ids"][0]) == len(step["input_ids"][0])
    )


def pass_note(step: Mapping[str, Any], many: bool) -> str:
    """The reordering of rows, and the state of cross-attention."""
    notes = []
    if many and step["step"] == 0:
        notes.append(f"prompt {step['rows'][0] + 1}")
    elif many and not step["reordered"]:
        prompts = sorted({row + 1 for row in step["rows"]})
        notes.append(f"prompt{'s' * (len(prompts) > 1)} " + " ".join(map(str, prompts)))
    if step["reordered"]:
        notes.append("rows ← " + " ".join(str(row + 1) for row in step["reordered"]))
    if step["cross_attention"] == "computed":
        notes.append("cross-attention computed")
    elif step["cross_attention"]:
        notes.append("cross kept")
    return ", ".join(notes)


def _given(step: Mapping[str, Any]) -> str:
    rows, fed = len(step["input_ids"]), len(step["input_ids"][0])
    return (f"{rows} × " if rows > 1 else "") + count(fed, "token")


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} … {high:,}"


def ended_words(ended: Mapping[str, Any] | None) -> str:
    """Why decoding ended, and when."""
    if ended is None:
        return "not ended"
    steps = count(ended["steps"], "step")
    reason = ended["reason"]
    if reason == "steps":
        every = "" if ended["steps"] == 1 else "all "
        return f"ended after {every}{steps}" if ended["steps"] else "ended after the prefill"
    if reason in ("length", "context"):
        bound = f" by the {widgets.visible(ended['stop'])}" if ended.get("stop") else ": all tokens were written"
        return f"ended after {steps}{bound}"
    what = widgets.visible(ended["stop"]) if ended.get("stop") else reason
    words = {"interrupted": "interrupted", "stop": f"ended by stop {what}"}.get(reason, f"ended by {reason}")
    return f"{words} after {steps}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: set[int]) -> list[Text]:
    """Columns two cells apart, those in `right` right-aligned; the headings dimmed."""
    every = [list(headings), *(list(map(widgets.visible, row)) for row in rows)]
    cells = [max(cell_len(row[place]) for row in every) for place in range(len(headings))]
    lines = []
    for number_, row in enumerate(every):
        line = Text(style=theme.DIM if number_ == 0 else theme.PLAIN, no_wrap=True)
        for place, text in enumerate(row):
            gap = " " * (cells[place] - cell_len(text))
            line.append("  " if place else "")
            line.append(gap + text if place in right else text + gap)
        line.rstrip()
        lines.append(line)
    return lines


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


# -- the part of a page that shows a cache: what was measured, and beside it what a plan says -------------------------

_LAYER = ("layer", "kind", "shape", "bytes")
_SUMS = ("model", "cache", "total_bytes", "reserved_bytes", "weights_bytes", "bytes_per_token")


def cache_part(report: Mapping[str, Any], planned: Mapping[str, Any] | None) -> dict[str, Any]:
    """The measured layers of each pass, the planned ones, and the heat map if there is one. Inputs are left out."""
    part = {name: report[name] for name in _SUMS}
    part["layers"] = _page_layers(report)
    part["steps"] = [
        {"step": step["step"], "total_bytes": step["total_bytes"], "layers": _page_layers(step)}
        for step in report["steps"]
    ]
    if planned is not None:
        part["planned"] = {"total_bytes": planned["total_bytes"], "layers": _page_layers(planned)}
    if "heatmap" in report:
        part["heatmap"] = _rounded(report["heatmap"])
    return part


def _page_layers(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{name: layer[name] for name in _LAYER} for layer in report["layers"]]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value

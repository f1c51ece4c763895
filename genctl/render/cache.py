"""What a cache holds, as text: layers in a table, sums, and how it grew from pass to pass.

Drawn from the report of `genctl inspect-cache` (plain JSON values), so that nothing is shown that is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, TypeAlias

from rich.cells import cell_len
from rich.text import Text

from genctl.render import parts, theme

Report: TypeAlias = Mapping[str, Any]
Layer: TypeAlias = Mapping[str, Any]

MOST = 24  # lines of layers above which equal ones stand together even where others lie between them
WIDE = 118  # columns from which on the share of each line is drawn as a bar
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
PIPE = 120  # columns of a rule where nobody says how wide the page is


@dataclass(frozen=True)
class Group:
    """Layers that are alike in everything but their number."""

    numbers: tuple[int, ...]
    layer: Layer

    @property
    def label(self) -> str:
        """`7`, `0-11`, or `0,2…46` where others lie between."""
        first, last = self.numbers[0], self.numbers[-1]
        if len(self.numbers) == 1:
            return str(first)
        if all(b == a + 1 for a, b in pairwise(self.numbers)):
            return f"{first}-{last}"
        return f"{first},{self.numbers[1]}…{last}" if len(self.numbers) > 2 else f"{first},{last}"

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return int(self.layer["bytes"]) * len(self.numbers)


def grouped(layers: Sequence[Layer], most: int = MOST) -> list[Group]:
    """Equal neighbours together; all equal ones, if those would be more than `most` lines."""
    found: list[Group] = []
    for layer in layers:
        last = found[-1] if found else None
        if last is not None and last.numbers[-1] + 1 == layer["layer"] and _alike(last.layer, layer):
            found[-1] = Group((*last.numbers, layer["layer"]), last.layer)
        else:
            found.append(Group((layer["layer"],), layer))
    if len(found) <= most:
        return found
    together: list[Group] = []
    for group in found:
        place = next((i for i, other in enumerate(together) if _alike(other.layer, group.layer)), None)
        if place is None:
            together.append(group)
        else:
            together[place] = Group((*together[place].numbers, *group.numbers), group.layer)
    return together


def _alike(one: Layer, other: Layer) -> bool:
    return {**one, "layer": 0} == {**other, "layer": 0}


def report_lines(report: Report, width: int | None) -> list[Text]:
    """The whole report in lines of at most `width` cells; None: as wide as it takes."""
    lines = heading_lines(report, width)
    lines += layer_lines(report, width)
    lines += sum_lines(report, width)
    lines += ["", *pass_lines(report, width)]  # type: ignore[list-item]  # a list is invariant
    return [fitted(line, width) if isinstance(line, Text) else Text(line) for line in lines]


def heading_lines(report: Report, width: int | None) -> list[Text]:
    """What was run: a rule, and a line for each prompt where there are several."""
    page = width or PIPE
    if "prompts" not in report:
        read = count(report["prompt_tokens"], "token")
        if report["reused_tokens"]:
            read += f", {report['reused_tokens']} reused"
        return [parts.header(page, report["model"], report["prompt"], read, report["strategy"])]
    lines = [parts.header(page, report["model"], count(len(report["prompts"]), "prompt"))]
    rows = [
        [
            str(place),
            count(prompt["prompt_tokens"], "token"),
            prompt["strategy"],
            ended_words(prompt["ended"]),
            parts.first_words(prompt["prompt"], 40),
        ]
        for place, prompt in enumerate(report["prompts"])
    ]
    return [*lines, *table(["prompt", "read", "strategy", "ended", "text"], rows, right={0})]


def layer_lines(report: Report, width: int | None) -> list[Text]:
    """A line for each layer, or for several that are alike."""
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
    made = table(heads, rows, right={5})
    used = max(line.cell_len for line in made)
    if width is not None and used > width:  # the kind is known from its first letters, the bytes are not
        kind = max(8, max(cell_len(row[1]) for row in rows) - (used - width))
        for row in rows:
            row[1] = row[1] if cell_len(row[1]) <= kind else parts.cells(row[1], kind)
        made = table(heads, rows, right={5})
        used = max(line.cell_len for line in made)
    if width is not None and width >= WIDE:
        made[0].append(" " * (used - made[0].cell_len) + "  share of the cache", style=theme.DIM)
        for line, share in zip(made[1:], bars, strict=True):
            line.append(" " * (used - line.cell_len + 2)).append_text(parts.bar(share, 12))
            line.append(f" {parts.percent(share)}")
        used = max(line.cell_len for line in made)
    if not any(details):
        return made
    beside = width is None or used + 2 + max(map(cell_len, details)) <= width
    lines = [made[0]]
    for line, detail in zip(made[1:], details, strict=True):
        lines.append(line)
        if detail and beside:
            line.append(" " * (used - line.cell_len + 2) + detail, style=theme.DIM)
        elif detail:
            lines.append(Text(f"{'':8}{detail}", style=theme.DIM))
    return lines


def layer_details(group: Group) -> list[str]:
    """What else there is to say of a line."""
    layer = group.layer
    said = []
    if len(group.numbers) > 1:
        said.append(f"{len(group.numbers)} × {layer['bytes']:,}")
    if "window" in layer:
        said.append(f"window {layer['window']}")
    if "filled" in layer:
        said.append(f"{layer['filled']} of {layer['shape'][2]} filled")
    if "shared" in layer:
        said.append(f"{layer['shared']} columns stored once for all rows")
    if "value_shape" in layer:
        said.append(f"values {layer['value_shape']}")
    if "states" in layer:
        said.append(" + ".join(f"{name} {shape}" for name, shape in layer["states"].items()))
    return said


def sum_lines(report: Report, width: int | None) -> list[Text]:
    """Totals: of the cache, beside the weights, for each row and for each token."""
    total, reserved, weights = report["total_bytes"], report["reserved_bytes"], report["weights_bytes"]
    last = report["steps"][-1] if report["steps"] else None
    rows = sum(len(one["input_ids"]) for one in report["steps"] if last and one["step"] == last["step"])
    found = [[("total", f"{total:,} bytes" + (f" ({size(total)})" if total >= 1024 else ""))]]
    if rows > 1:
        found[0].append(("", f"{number(report['bytes_per_row'])} for each of {rows} rows"))
    if report["share_of_weights"] is not None:
        found[0].append(("", f"{share(report['share_of_weights'])} of the weights ({size(weights)})"))
    if reserved > total:
        found.append([("reserved", f"{reserved:,} bytes, room for later tokens included")])
    if report["bytes_per_token"] is not None:
        found.append([("growth", f"{number(report['bytes_per_token'])} bytes for each new token of each row")])
    if "ended" in report:
        found.append([("ended", ended_words(report["ended"]).removeprefix("ended "))])
    lines = []
    for items in found:
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


def pass_lines(report: Report, width: int | None) -> list[Text]:
    """A line for each pass: what it was given, what the cache held after it and how much that was more."""
    many = "prompts" in report
    rows = []
    for _, same in groupby(enumerate(report["steps"]), key=_pass_key(report["steps"])):
        members = [one for _, one in same]
        first, last = members[0], members[-1]
        label = str(first["step"]) if len(members) == 1 else f"{first['step']}-{last['step']}"
        cells = [label, _given(first), _range(first["past_length"], last["past_length"])]
        cells += [_range(first["total_bytes"], last["total_bytes"]), f"{first['growth_bytes']:+,}"]
        rows.append([*cells, pass_note(first, many)])
    heads = ["step", "given", "past", "bytes after", "growth", ""]
    return table(heads, rows, right={0, 2, 3, 4})


def _pass_key(steps: Sequence[Mapping[str, Any]]) -> Any:
    """Passes that follow each other and say the same stand on one line."""

    def key(item: tuple[int, Mapping[str, Any]]) -> Any:
        place, one = item
        before = steps[place - 1] if place else None
        same = before is not None and _same(before, one)
        if not same:
            starts.append(place)
        return starts[-1]

    starts: list[int] = []
    return key


def _same(before: Mapping[str, Any], one: Mapping[str, Any]) -> bool:
    return (
        before["step"] > 0
        and one["step"] == before["step"] + 1
        and not one["reordered"]
        and not before["reordered"]
        and all(before[name] == one[name] for name in ("rows", "growth_bytes", "cross_attention"))
        and len(before["input_ids"][0]) == len(one["input_ids"][0])
    )


def pass_note(one: Mapping[str, Any], many: bool) -> str:
    """What happened to rows and to cross-attention."""
    said = []
    if many and one["step"] == 0:
        said.append(f"prompt {one['rows'][0]}")
    elif many and not one["reordered"]:
        found = sorted(set(one["rows"]))
        said.append(f"prompt{'s' * (len(found) > 1)} " + " ".join(map(str, found)))
    if one["reordered"]:
        said.append("rows ← " + " ".join(map(str, one["reordered"])))
    if one["cross_attention"] == "computed":
        said.append("cross-attention computed")
    elif one["cross_attention"]:
        said.append("cross kept")
    return ", ".join(said)


def _given(one: Mapping[str, Any]) -> str:
    rows, fed = len(one["input_ids"]), len(one["input_ids"][0])
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
        return f"ended after all {steps}" if ended["steps"] else "ended after the prefill"
    if reason == "length":
        bound = f" by the {parts.visible(ended['stop'])}" if ended.get("stop") else ": all tokens were written"
        return f"ended after {steps}{bound}"
    what = parts.visible(ended["stop"]) if ended.get("stop") else reason
    words = {"interrupted": "interrupted", "stop": f"ended by stop {what}"}.get(reason, f"ended by {reason}")
    return f"{words} after {steps}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: set[int]) -> list[Text]:
    """Columns two cells apart, those in `right` aligned to the right; the headings dimmed."""
    every = [list(headings), *(list(map(parts.visible, row)) for row in rows)]
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


def fitted(line: Text, width: int | None) -> Text:
    """The line, cut with … where it is too long."""
    line.no_wrap = True
    if width is not None:
        line.truncate(width, overflow="ellipsis")
    return line


def size(bytes: float) -> str:
    """Bytes in the largest unit that leaves a number of at least one."""
    place = 0
    while bytes >= 1024 and place + 1 < len(UNITS):
        bytes, place = bytes / 1024, place + 1
    return f"{bytes:.0f} {UNITS[0]}" if place == 0 else f"{bytes:.1f} {UNITS[place]}"


def share(part: float) -> str:
    """A share as a percentage with two digits that count."""
    return f"{part * 100:.2g}%" if part < 0.1 else f"{part * 100:.1f}%"


def number(value: float | None) -> str:
    """A count with thousands, with a decimal where there is one."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def count(many: int, what: str) -> str:
    """`1 token`, `7 tokens`."""
    return f"{many:,} {what}{'' if many == 1 else 's'}"

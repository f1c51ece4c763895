"""The live view of a cache: a line and a bar for each layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from genctl.commands.inspect import cache_report as tables
from genctl.commands.inspect.cache_report import Layer, grouped, share
from genctl.errors import size
from genctl.events import Began, CacheRead, Event, Failed, Finished, Prefilled, Stepped
from genctl.events.history import ROOT, LaneHistory
from genctl.terminal import theme, widgets
from genctl.terminal.live_region import ErasedView, LiveRegion
from genctl.terminal.progress_bars import LoadingBar
from genctl.terminal.text_width import last_cells

FEW = 4  # lines that are no layers: heading, heads of columns, sums, text


class CacheView(ErasedView):
    """Draws the cache on `out` during a run, if `live`; loading is shown on `err`.

    Redrawn at most every 50 ms; `hide` erases it. `quiet`: no loading bar. `weights` in bytes. `clock` gives seconds.
    """

    def __init__(
        self,
        out: Console,
        err: Console,
        *,
        live: bool,
        steps: int,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out = out
        self.steps = steps
        self.weights = 0
        self.read: CacheRead | None = None
        self.step = 0
        self._best = ROOT  # the row that is shown
        self._passes: dict[str, int] = {}  # of each lane, after its prefill
        self._lanes: dict[str, LaneHistory] = {}
        self._live = live and out.is_interactive
        self._quiet = quiet
        self._clock = clock
        self._bar = LoadingBar(err, clock)
        self._region = LiveRegion(out, clock)

    def feed(self, event: Event) -> None:
        """Take in one event and show what it changes."""
        if self._bar.takes(event, quiet=self._quiet):
            return
        if not self._live:
            return
        if isinstance(event, (Began, Finished, Failed)):
            self._lanes.pop(event.lane, None)
        elif isinstance(event, Prefilled):
            self._passes[event.lane] = 0
        elif isinstance(event, Stepped):
            history = self._lanes.get(event.lane) or LaneHistory(event.lane)
            history = self._lanes[event.lane] = history.after(event)
            self._best = history.rows[0] if history.rows else self._best
        elif isinstance(event, CacheRead):
            self.read = event
            for lane in set(event.lanes or (event.lane,)) & self._passes.keys():
                self._passes[lane] += 1
                self.step = min(max(self.step, self._passes[lane]), self.steps)
            if self._region.is_due(self._clock()):
                self._draw()

    def hide(self) -> None:
        """Erase the live region and every bar."""
        self._bar.close()
        self._region.hide()

    def _draw(self) -> None:
        assert self.read is not None
        text, height = self._best.text(), max(self.out.height - 1, 1)
        lines = picture(self.read, self.step, self.steps, self.weights, text, self.out.width, height)
        self._region.draw(lines)


def picture(read: CacheRead, step: int, steps: int, weights: int, text: str, width: int, height: int) -> list[Text]:
    """The cache after a pass in at most `height` lines of at most `width` cells."""
    total = sum(layer["bytes"] for layer in read.layers)
    lines = [widgets.header(width, f"step {step} of {steps}", "prefill" if step == 0 else "")]
    groups = grouped(read.layers, max(height - FEW, 1))
    hidden = max(len(groups) - max(height - FEW, 1), 0)
    shown = groups[: len(groups) - hidden - (hidden > 0)] if hidden else groups
    reach = 0 if read.given is None else read.given.past_length + len(read.given.input_ids[0])
    rows = [_cells(group.layer, group.label, group.bytes, reach, max(steps - step, 0)) for group in shown]
    table = tables.table(["layer", "kind", "shape", "bytes", "held"], [cells for cells, _ in rows], right={3, 4})
    used = max(line.cell_len for line in table)
    room = min(width - used - 2, 40)
    for line, (_, filled) in zip(table[1:], rows, strict=True):
        if room >= 4:
            line.append(" " * (used - line.cell_len + 2)).append_text(widgets.bar(filled, room))
    lines += table
    if hidden:
        lines.append(Text(f"… and {len(groups) - len(shown)} more lines", style=theme.DIM))
    words = f"total {total:,} bytes ({size(total)})"
    if weights:
        words += f" · {share(total / weights)} of the weights"
    count = len(read.lanes) or 1
    if count > 1:
        words += f" · {count} rows"
    lines += [Text(words), Text(last_cells(text, width), style=theme.DIM)]
    return [widgets.fit(line, width) for line in lines][:height]


def _cells(layer: Layer, label: str, bytes_: int, reach: int, left: int) -> tuple[list[str], float]:
    """A layer's cells, and how full it is, as a share of what it can hold."""
    shape: Sequence[Any] = layer["shape"]
    held, most = 1, 1
    words = "all"
    if layer["kind"] not in ("recurrent state", "cross-attention"):
        held = layer.get("filled", shape[2])
        most = shape[2] if "filled" in layer else max(shape[2], reach) + left
        if "window" in layer:
            most = max(layer["window"] - 1, 1)
        words = f"{held}/{most}"
    return [label, layer["kind"], str(list(shape)), f"{bytes_:,}", words], held / most if most else 0.0

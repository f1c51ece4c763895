"""The norms of keys and values in a cache, position by position, and their heat map: they show attention sinks.

The norm of one position is the L2 norm over head_dim, averaged over heads and rows. The first token, which receives
surplus attention (Xiao et al. 2023, arXiv:2309.17453), has much shorter keys and values than all others (Gu et al.
2024, arXiv:2410.10781, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.style import Style
from rich.text import Text
from torch import Tensor

from genctl.commands.inspect.cache_report import PIPE
from genctl.decode.cache.cache import Cache
from genctl.decode.cache_observer import CacheObserver
from genctl.decode.runtime import ModelRuntime
from genctl.engines.protocol import Report, Request
from genctl.engines.session import Session
from genctl.errors import ModelError
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import hanging


def observed_cache(forward: ModelRuntime) -> Cache | None:
    """The cache after the newest pass of an observed run; else None. It is not a copy."""
    observer = forward.watch
    return observer.passed.cache if isinstance(observer, CacheObserver) and observer.passed is not None else None


def norms(cache: Cache, *, cross: bool = False) -> tuple[int, list[dict[str, Any]]]:
    """The number of positions, and for each layer `{"layer", "keys", "values"}`, a number for each position.

    None marks positions that a window dropped. Layers with a state instead of positions are left out. `cross` reads an
    encoder-decoder's cross-attention, whose positions are the source's.
    """
    entries = []
    total = 0
    for number, layer in enumerate((cache.cross or ()) if cross else cache.layers):
        if not layer.is_initialized:
            continue
        keys, values = layer.content()
        seen = max(layer.get_seq_length(), int(keys.shape[-2]))
        total = max(total, seen)
        gone = [None] * (seen - int(keys.shape[-2]))
        entries.append({"layer": number, "keys": [*gone, *_lengths(keys)], "values": [*gone, *_lengths(values)]})
    return total, entries


def _lengths(states: Tensor) -> list[float]:
    """states [rows, heads, length, head_dim] -> `length` numbers."""
    lengths: list[float] = states.float().norm(dim=-1).mean((0, 1)).tolist()
    return lengths


# positions, self-attention, cross-attention
CacheNorms: TypeAlias = tuple[int, list[dict[str, Any]], list[dict[str, Any]]]


def check(session: Session) -> None:
    """Raises ModelError if no layer of this model keeps keys and values."""
    name, forward = session.loaded.name, session.forward
    if not forward.abilities.supports_cache:
        raise ModelError(f"{name} keeps no cache, so --heatmap has nothing to look into")
    if not any(layer.has_columns for layer in forward.new_cache().layers):
        raise ModelError(f"--heatmap shows keys and values, and {name} keeps none: its layers have recurrent states")


def current_norms(session: Session) -> CacheNorms | None:
    """The norms at this moment of an observed run."""
    cache = observed_cache(session.forward)
    if cache is None:
        return None
    total, layers = norms(cache)
    return total, layers, norms(cache, cross=True)[1]


def heatmap(session: Session, request: Request, norms: CacheNorms, tokens: Sequence[int]) -> dict[str, Any]:
    """The report of the norms. `tokens` are those of the first row; a reused prompt is put before them."""
    total, layers, cross = norms
    lane = session.planner.plan(request, Report()).lane
    ids = [*lane.tokens, *tokens[len(lane.tokens) :]][:total]
    report = {**_positions(session, ids, total), "layers": layers}
    if cross:
        source = list(lane.source or ())
        report["cross"] = {**_positions(session, source, len(source)), "layers": cross}
    return report


def _positions(session: Session, ids: Sequence[int], total: int) -> dict[str, Any]:
    from genctl.models.text import Detokenizer

    tokenizer = session.loaded.tokenizer
    words = None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens=False)
    texts = [f"#{id}" if words is None else words.piece(id) for id in ids]
    return {"positions": list(range(total)), "tokens": texts}


LABEL = 8  # cells before the first position
CELL = 6  # cells of a position
BLOCKS = 6  # blocks of positions that are shown; of more the first and the last ones


def heatmap_lines(heatmap: Mapping[str, Any], width: int | None) -> list[Text]:
    """The norms in blocks of positions, in lines of at most `width` cells.

    A line is a layer's keys (k) or values (v); colours are shares of its largest norm. `·` marks a position that a
    window dropped.
    """
    page = width or PIPE
    lines = _part(heatmap, page, "self-attention" if "cross" in heatmap else "")
    if "cross" in heatmap:
        lines += _part(heatmap["cross"], page, "cross-attention")
    return [*(widgets.fit(line, page) for line in lines), *_legend(page)]


def _part(part: Mapping[str, Any], width: int, name: str) -> list[Text]:
    lines = [widgets.header(width, "norms of keys and values", name)]
    per = max((width - LABEL) // CELL, 1)
    starts = list(range(0, len(part["positions"]), per))
    shown = starts if len(starts) <= BLOCKS else [*starts[: BLOCKS - 1], starts[-1]]
    before = -per
    for start in shown:
        if start != before + per:
            left = Text(f"positions {before + per} to {start - 1} are left out; --format json has them all")
            left.stylize(theme.DIM)
            lines.append(left)
        lines += _block(part, start, min(start + per, len(part["positions"])))
        before = start
    return lines


def _block(part: Mapping[str, Any], start: int, end: int) -> list[Text]:
    numbers = Text("position".ljust(LABEL), style=theme.DIM)
    tokens = Text("token".ljust(LABEL), style=theme.DIM)
    for place in range(start, end):
        numbers.append(f"{part['positions'][place]:>{CELL}}")
        text = widgets.first_words(part["tokens"][place].strip() or "␣", CELL - 1)
        tokens.append(" " * (CELL - Text(text).cell_len) + text)
    lines = [numbers, tokens]
    for layer in part["layers"]:
        for letter, values in (("k", layer["keys"]), ("v", layer["values"])):
            line = Text().append(f"{layer['layer']:>{LABEL - 3}} {letter} ", style=theme.DIM)
            most = max((value for value in values if value is not None), default=0.0)
            for value in values[start:end]:
                line.append(_cell(value, most))
            lines.append(line)
    return lines


def _cell(value: float | None, most: float) -> Text:
    if value is None:
        return Text(f"{'·':>{CELL}}", style=theme.DIM)
    return Text(_number(value).rjust(CELL), style=theme.colour(value / most if most else 0.0))


def _number(value: float) -> str:
    """At most five characters."""
    for digits in (2, 1, 0):
        text = f"{value:.{digits}f}"
        if len(text) <= CELL - 1:
            return text
    return f"{value:.0e}".replace("e+0", "e")


def _legend(width: int) -> list[Text]:
    lines = hanging("", "L2 norms, mean of heads and rows; colour: share of the layer's longest", width - 7, theme.DIM)
    lines[-1].append(" ")
    for step in range(0, 11, 2):
        lines[-1].append("█", style=Style(dim=False) + theme.colour(step / 10))
    return lines

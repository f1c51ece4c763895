"""Check the numbers in config.json that become dimensions, before anything is allocated.

Libraries have more than a thousand names for such numbers, so a number counts as a size unless its name says otherwise.
The bounds are generous: no published model comes near them, and a number within them costs megabytes at most.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from genctl.errors import ModelError
from genctl.models.weights import shown

MOST = 1 << 16  # the largest size that is not a dimension of a tensor in the weight files
_DEEPEST = 8
# Not sizes: ids of tokens, lengths in tokens, samples and pixels, rates, seeds, and training parameters.
_OTHERWISE = re.compile(
    r".*(token|vocab|_ids?$|_index|offset|theta|base|length|position|context|window|chunk|floor|seed|rate|samples"
    r"|pixels|max_|min_|_max$|_min$|factor|version|budget|steps?$|hop|fft|image_size|budget|ctx|hash|period|threshold"
    r"|limit|bucket|distance|duration|frames|seconds|clip|param|bytes|flops|epoch|batch|timestamp|seen).*"
    r"|n_positions|pad_.*|.*_(ms|sec)"
)
_TABLE = re.compile(
    r".*(vocab|position|hash|bucket).*"
)  # rows of a table, many of which a checkpoint may keep in parts
MOST_ROWS = 1 << 20


def check(config: dict[str, Any], widest: int, *, known: Collection[str] = (), source: str = "config.json") -> None:
    """Refuse sizes that no tensor has; `widest` is the largest dimension of any tensor. Raises ModelError.

    `known` are names with bounds of their own; `source` is what the message calls the place of the config.
    """
    for where, value in _sizes(config, ""):
        name = where.rpartition(".")[2]
        if name in known:
            continue
        most = max(MOST_ROWS, 64 * widest) if _OTHERWISE.fullmatch(name) else max(MOST, widest)
        if value > most:
            raise ModelError(f"{source} says {where} = {value!r:.40}, far above what any model has ({most:,})")


def _sizes(part: dict[str, Any], where: str) -> Iterator[tuple[str, int]]:
    """Each size with its name, including nested objects and lists."""
    if where.count(".") > _DEEPEST:
        return
    for key, value in part.items():
        name = f"{where}{shown(key, 60)}"
        if isinstance(value, dict):
            yield from _sizes(value, f"{name}.")
        elif _TABLE.fullmatch(key) or not _OTHERWISE.fullmatch(key):
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int or (isinstance(number, float) and number.is_integer()):
                    yield name, int(number)

"""Which lanes may choose together: those with equal knobs whose rows are independent."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from genctl.decode.processors.context import NamedProcessor
from genctl.decode.types import Independent, Lane


class ChoiceMode(NamedTuple):
    """How a lane chooses, the same at every step."""

    independent: Independent | None  # its strategy, if that needs no search
    tolerant: bool  # accepts NaN logits
    key: Any  # equal for lanes that may choose together; None if the lane chooses alone


def choice_mode(lane: Lane) -> ChoiceMode:
    """How a lane chooses."""
    independent = lane.strategy if isinstance(lane.strategy, Independent) else None
    named = [processor for processor in lane.processors if isinstance(processor, NamedProcessor)]
    tolerant = any(processor.name == "remove_invalid_values" for processor in named)
    keys = tuple(processor.key for processor in named)
    if lane.trace or independent is None or len(keys) < len(lane.processors) or None in keys:
        return ChoiceMode(independent, tolerant, None)
    return ChoiceMode(independent, tolerant, _first((independent, keys, lane.top, lane.scores, lane.watch)))


@lru_cache(maxsize=64)
def _first(key: Any) -> Any:
    """The first of equal keys: comparing an object with itself is cheap."""
    return key

"""The texts of several lanes' events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from genctl.engines.local.lane_text import LaneText
from genctl.events import Event, Loading
from genctl.models.text import Words


def with_texts(stream: Iterable[Event], words: Words, lanes: dict[str, dict[str, Any]] | None = None) -> list[Event]:
    """The events with their texts. `lanes` has the arguments of the `LaneText` of some lanes."""
    texts: dict[str, LaneText] = {}
    filled: list[Event] = []
    for event in stream:
        if isinstance(event, Loading):
            filled.append(event)
            continue
        if event.lane not in texts:
            texts[event.lane] = LaneText(words, **(lanes or {}).get(event.lane, {}))
        filled.append(texts[event.lane].filled(event))
    return filled

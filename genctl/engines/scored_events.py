"""A scored text as the events of a lane that wrote it at once, so that it is shown as a generated one is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genctl.events import Began, Ended, Event, Finished, Hypothesis, Stepped

if TYPE_CHECKING:
    from genctl.engines.scored_text import Scored


def scored_events(lane: str, before: str, model: str, one: Scored) -> Iterator[Event]:
    """The events of a text that was scored after `before`."""
    ids = tuple(token.id for token in one.tokens)
    text = "".join(token.text for token in one.tokens)
    hypothesis = Hypothesis(ids, -one.nll, -one.nll, "scored", score=one.mean, text=text)
    yield Began(lane, before, "score", model)
    yield Stepped(lane, 0, (), (Ended(lane, 0, one.tokens, hypothesis),))
    yield Finished(lane, (hypothesis,))

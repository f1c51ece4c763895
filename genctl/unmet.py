"""Which forced phrases a finished text lacks, told by looking at the text: whatever search wrote it, however it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from genctl import events
from genctl.params import Generation

if TYPE_CHECKING:
    from genctl.strategies.promises import Promises


@dataclass(frozen=True)
class Wishes:
    """The promises of one lane, with what each is called."""

    promises: Promises
    names: tuple[str, ...]

    def unmet(self, hypothesis: events.Hypothesis) -> events.Hypothesis:
        """The hypothesis with the names of the promises that its tokens do not keep."""
        found = tuple(self.names[place] for place in self.promises.open_in(hypothesis.tokens))
        return dataclasses.replace(hypothesis, unmet=found) if found else hypothesis


def names(generation: Generation, text: Callable[[Sequence[int]], str]) -> tuple[str, ...]:
    """What `force_words_ids` and then `force_words` ask for, as text; alternatives with "|" between them.

    `text` decodes ids; where it gives nothing they are named themselves.
    """
    found = []
    for given in generation.force_words_ids or []:
        phrases = [[token for token in given if isinstance(token, int)]]
        if any(isinstance(item, list) for item in given):
            phrases = [item for item in given if isinstance(item, list)]
        found.append(" | ".join(text(ids).strip() or str(ids) for ids in phrases))
    for word in generation.force_words or []:
        found.append(word if isinstance(word, str) else " | ".join(word))
    return tuple(found)


def noted(stream: Iterable[events.Event], wishes: Mapping[str, Wishes]) -> Iterator[events.Event]:
    """The same events; hypotheses of lanes in `wishes`, which may grow meanwhile, name what they lack."""
    for event in stream:
        wish = wishes.get(event.lane) if isinstance(event, (events.Stepped, events.Finished)) else None
        if wish is None:
            yield event
        elif isinstance(event, events.Finished):
            yield dataclasses.replace(event, hypotheses=tuple(map(wish.unmet, event.hypotheses)))
        elif isinstance(event, events.Stepped):
            ended = [dataclasses.replace(one, hypothesis=wish.unmet(one.hypothesis)) for one in event.ended]
            yield dataclasses.replace(event, ended=tuple(ended)) if ended else event

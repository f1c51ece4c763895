"""Which forced phrases a finished text lacks: looked for in its tokens and its text, however it was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from genctl import events
from genctl.params import Generation

if TYPE_CHECKING:
    from genctl.strategies.constraints import Constraints


@dataclass(frozen=True)
class Wish:
    """One promise as it was given: texts of which one is enough, or their ids."""

    name: str
    texts: tuple[str, ...]  # empty where ids have no text
    literal: bool  # whether texts were given, which any tokens may spell

    def there(self, text: str, times: int) -> bool:
        """Whether a text holds it so often."""
        return sum(text.count(candidate) for candidate in self.texts) >= times


@dataclass(frozen=True)
class Wishes:
    """The promises of one lane."""

    promises: Constraints
    wishes: tuple[Wish, ...]
    text: Callable[[Sequence[int]], str]  # of ids

    def unmet(self, hypothesis: events.Hypothesis) -> events.Hypothesis:
        """The hypothesis with the names of what it lacks.

        Its tokens decide, and the text: a stop can cut a word away again, and other tokens can spell it.
        """
        lacking = self.promises.open_in(hypothesis.tokens)
        cut = hypothesis.reason == "stop" and self.text(hypothesis.tokens) != hypothesis.text
        unmet = []
        for place, wish in enumerate(self.wishes):
            seen = wish.there(hypothesis.text, self.wishes[: place + 1].count(wish))
            if (place in lacking and not (wish.literal and seen)) or (cut and wish.texts and not seen):
                unmet.append(wish.name)
        return dataclasses.replace(hypothesis, unmet=tuple(unmet)) if unmet else hypothesis


def wishes(generation: Generation, text: Callable[[Sequence[int]], str]) -> tuple[Wish, ...]:
    """What `force_words_ids` and then `force_words` ask for; alternatives are named with "|" between them.

    `text` decodes ids; where it gives nothing they are named themselves.
    """
    result = []
    for given in generation.force_words_ids or []:
        phrases = [[token for token in given if isinstance(token, int)]]
        if any(isinstance(item, list) for item in given):
            phrases = [item for item in given if isinstance(item, list)]
        texts = [text(ids).strip() for ids in phrases]
        name = " | ".join(word or str(ids) for word, ids in zip(texts, phrases, strict=True))
        result.append(Wish(name, tuple(texts) if all(texts) else (), False))
    for word in generation.force_words or []:
        words = [word] if isinstance(word, str) else word
        result.append(Wish(" | ".join(words), tuple(one.strip() or one for one in words), True))
    return tuple(result)


def noted(stream: Iterable[events.Event], lanes: Mapping[str, Wishes]) -> Iterator[events.Event]:
    """The same events; hypotheses of `lanes`, which may grow meanwhile, name what they lack."""
    for event in stream:
        wish = lanes.get(event.lane) if isinstance(event, (events.Stepped, events.Finished)) else None
        if wish is None:
            yield event
        elif isinstance(event, events.Finished):
            yield dataclasses.replace(event, hypotheses=tuple(map(wish.unmet, event.hypotheses)))
        elif isinstance(event, events.Stepped):
            ended = [dataclasses.replace(row, hypothesis=wish.unmet(row.hypothesis)) for row in event.ended]
            yield dataclasses.replace(event, ended=tuple(ended)) if ended else event

"""What is added to the results of a lane behind the core.

The forced phrases that a text lacks, by its tokens and by its text, and incomplete grammars are marked; samples are
reranked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from genctl.events import CUT, Event, Finished, Hypothesis, Stepped
from genctl.params import Generation

if TYPE_CHECKING:
    from genctl.decode.processors.grammar import Grammar
    from genctl.engines.local.rerank import RerankPlan
    from genctl.strategies.constraints import Constraints


@dataclass(frozen=True)
class ForcedPhrase:
    """One constraint as given: alternative texts, or their ids."""

    name: str
    texts: tuple[str, ...]  # empty if the ids have no text
    literal: bool  # whether it was given as texts, which any tokens may spell

    def is_in(self, text: str, times: int) -> bool:
        """Whether a text contains it `times` times."""
        return sum(text.count(candidate) for candidate in self.texts) >= times


@dataclass(frozen=True)
class ForcedPhrases:
    """The constraints of one lane."""

    constraints: Constraints
    phrases: tuple[ForcedPhrase, ...]
    text: Callable[[Sequence[int]], str]  # of ids

    def unmet(self, hypothesis: Hypothesis) -> Hypothesis:
        """The hypothesis with the names of the phrases that it lacks.

        A phrase counts if it is in the tokens and in the text: a stop can cut it away, and other tokens can spell it.
        """
        lacking = self.constraints.open_in(hypothesis.tokens)
        cut = hypothesis.reason == "stop" and self.text(hypothesis.tokens) != hypothesis.text
        unmet = []
        for place, phrase in enumerate(self.phrases):
            present = phrase.is_in(hypothesis.text, self.phrases[: place + 1].count(phrase))
            if (place in lacking and not (phrase.literal and present)) or (cut and phrase.texts and not present):
                unmet.append(phrase.name)
        return dataclasses.replace(hypothesis, unmet=tuple(unmet)) if unmet else hypothesis


def forced_phrases(generation: Generation, text: Callable[[Sequence[int]], str]) -> tuple[ForcedPhrase, ...]:
    """The phrases of `force_words_ids` and then of `force_words`; alternatives are named with "|" between them.

    `text` decodes ids; ids without text are named themselves.
    """
    result = []
    for constraint in generation.force_words_ids or []:
        phrases = [[token for token in constraint if isinstance(token, int)]]
        if any(isinstance(item, list) for item in constraint):
            phrases = [item for item in constraint if isinstance(item, list)]
        texts = [text(ids).strip() for ids in phrases]
        name = " | ".join(word or str(ids) for word, ids in zip(texts, phrases, strict=True))
        result.append(ForcedPhrase(name, tuple(texts) if all(texts) else (), False))
    for word in generation.force_words or []:
        words = [word] if isinstance(word, str) else word
        result.append(
            ForcedPhrase(" | ".join(words), tuple(alternative.strip() or alternative for alternative in words), True)
        )
    return tuple(result)


class LaneResults:
    """Completes one lane's results. `prompt_length` counts the tokens before those that `grammar` reads."""

    def __init__(
        self,
        *,
        phrases: ForcedPhrases | None = None,
        grammar: Grammar | None = None,
        prompt_length: int = 0,
        ranking: RerankPlan | None = None,
    ) -> None:
        self.phrases = phrases
        self.grammar, self.prompt_length = grammar, prompt_length
        self.ranking = ranking

    def completed(self, event: Event) -> Event:
        """The event with completed results."""
        if isinstance(event, Stepped) and event.ended and self.phrases is not None:
            ended = (dataclasses.replace(row, hypothesis=self._named(row.hypothesis)) for row in event.ended)
            return dataclasses.replace(event, ended=tuple(ended))
        return self._finished(event) if isinstance(event, Finished) else event

    def _finished(self, event: Finished) -> Finished:
        hypotheses: Sequence[Hypothesis] = [self._checked(self._named(hypothesis)) for hypothesis in event.hypotheses]
        if self.ranking is None:
            return dataclasses.replace(event, hypotheses=tuple(hypotheses))
        from genctl.engines.local.rerank import rerank

        every = dataclasses.replace(self.ranking, returned=len(hypotheses))
        ranked = rerank(hypotheses, [hypothesis.text for hypothesis in hypotheses], every)
        best, rest = ranked[: self.ranking.returned], ranked[self.ranking.returned :]
        return dataclasses.replace(event, hypotheses=best, others=rest)

    def _named(self, hypothesis: Hypothesis) -> Hypothesis:
        """The hypothesis with the phrases that it lacks."""
        return hypothesis if self.phrases is None else self.phrases.unmet(hypothesis)

    def _checked(self, hypothesis: Hypothesis) -> Hypothesis:
        """The hypothesis, marked if the budget or the time cut off a text that is incomplete in the grammar."""
        grammar = self.grammar
        if grammar is None or hypothesis.reason not in CUT:
            return hypothesis
        if not grammar.cut(hypothesis.tokens, self.prompt_length):
            return hypothesis
        return dataclasses.replace(hypothesis, incomplete=grammar.source.knob)

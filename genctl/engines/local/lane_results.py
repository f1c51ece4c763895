"""What is added to the results of a lane behind the core.

Missing phrases and incomplete grammars are marked, and samples are reranked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from genctl.events import CUT, Event, Finished, Hypothesis, Stepped

if TYPE_CHECKING:
    from genctl.decode.processors.grammar import Grammar
    from genctl.engines.local.forced_phrases import ForcedPhrases
    from genctl.engines.local.rerank import RerankPlan


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

"""The text of a lane: its tokens become characters, stops cut them, and finished sequences are completed.

Each live row has a `RowText`, which is forked if the row has several children. The detokenizer writes the texts,
without what the prompt has already. Stops cut them (`stop_text`). Then missing phrases and incomplete grammars are
marked, and samples are reranked.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from genctl.events import CUT, Ended, Event, Finished, Hypothesis, Row, Stepped, Token, advance, with_tokens

if TYPE_CHECKING:
    from genctl.decode.processors.grammar import Grammar
    from genctl.engines.local.forced_phrases import ForcedPhrases
    from genctl.engines.local.rerank import RerankPlan
    from genctl.engines.local.stop_text import StopTrimmer
    from genctl.models.text import Words


class LaneText:
    """Fills in the texts of one lane's events.

    `words` is a detokenizer behind the prompt. `prompt_length` counts the tokens before those that `grammar` reads.
    """

    def __init__(
        self,
        words: Words,
        *,
        stops: StopTrimmer | None = None,
        phrases: ForcedPhrases | None = None,
        grammar: Grammar | None = None,
        prompt_length: int = 0,
        ranking: RerankPlan | None = None,
    ) -> None:
        self.words = words
        self.stops = stops if stops is not None and stops.needed else None
        self.phrases = phrases
        self.grammar, self.prompt_length = grammar, prompt_length
        self.ranking = ranking
        self._rows = [RowText(self)]

    def filled(self, event: Event) -> Event:
        """The event with its texts. Raises InputError if a row continues one that does not exist."""
        if isinstance(event, Stepped):
            self._rows, ended = advance(self._rows, event, RowText.grow, RowText.fork)
            last = [
                dataclasses.replace(row, written=text.written, hypothesis=self._named(text.hypothesis))
                for row, text in zip(event.ended, ended, strict=True)
                if text.hypothesis is not None
            ]
            return with_tokens(event, [text.written for text in self._rows], tuple(last))
        return self._finished(event) if isinstance(event, Finished) else event

    def _finished(self, event: Finished) -> Finished:
        hypotheses: Sequence[Hypothesis] = [
            self._checked(self._named(self.decoded(hypothesis))) for hypothesis in event.hypotheses
        ]
        if self.ranking is None:
            return dataclasses.replace(event, hypotheses=tuple(hypotheses))
        from genctl.engines.local.rerank import rerank

        every = dataclasses.replace(self.ranking, returned=len(hypotheses))
        ranked = rerank(hypotheses, [hypothesis.text for hypothesis in hypotheses], every)
        best, rest = ranked[: self.ranking.returned], ranked[self.ranking.returned :]
        return dataclasses.replace(event, hypotheses=best, others=rest)

    def decoded(self, hypothesis: Hypothesis) -> Hypothesis:
        """The hypothesis with its text, cut at stops."""
        hypothesis = dataclasses.replace(hypothesis, text=self.words.decode(hypothesis.tokens))
        return hypothesis if self.stops is None else dataclasses.replace(hypothesis, text=self.stops.text(hypothesis))

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


class RowText:
    """The text of one row, token by token."""

    def __init__(self, lane: LaneText) -> None:
        self.lane = lane
        self.words = lane.words.fork()
        self.held = None if lane.stops is None else lane.stops.held()
        self.written: tuple[Token, ...] = ()  # the newest tokens, with their text
        self.hypothesis: Hypothesis | None = None  # the result with its text, if the row ended

    def fork(self) -> RowText:
        """A second row in the same state."""
        twin = copy.copy(self)
        twin.words, twin.held = self.words.fork(), None if self.held is None else self.held.fork()
        return twin

    def grow(self, row: Row | Ended) -> RowText:
        """Add the new tokens of a row. The last token of an ended row gets all text that was held back."""
        end = self.hypothesis = self.lane.decoded(row.hypothesis) if isinstance(row, Ended) else None
        written, piece, last = [], self.words.piece, len(row.written) - 1
        for place, token in enumerate(row.written):
            text = self._text(token.id, end if place == last else None)
            top = token.top and tuple((id, piece(id), logprob) for id, _, logprob in token.top)
            watched = token.watched and tuple((id, piece(id), value, rank) for id, _, value, rank in token.watched)
            # not `dataclasses.replace`, which takes three times as long for every token
            written.append(
                Token(
                    token.id, token.logprob, text, token.rank, token.entropy, top, token.trace, watched, token.processed
                )
            )
        self.written = tuple(written)
        return self

    def _text(self, token: int, end: Hypothesis | None) -> str:
        """The text that a token adds; `end` is the row's result, if it ended."""
        text = self.words.push(token)
        if end is not None:
            text += self.words.flush()
        if self.held is not None:
            text = self.held.release(token, text)
            if end is not None:
                text += end.text[self.held.released :]
        return text

"""What an engine adds to the results of a lane after the decode core.

It marks missing forced phrases (by tokens and by text) and texts that are incomplete in a grammar, and measures
thoughts. It reranks finished samples, from their texts and log-probabilities alone: best of n by log-probability, and
minimum Bayes risk.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from genctl import events
from genctl.events import CUT, Event, Finished, Hypothesis, Stepped
from genctl.params import Generation

if TYPE_CHECKING:
    from genctl.decode.processors.grammar import Grammar
    from genctl.decode.processors.thinking import Thinking
    from genctl.decode.types import Strategy
    from genctl.models.text import Words
    from genctl.strategies.constraints import Constraints

ORDER, BETA = 6, 2.0  # of chrF: the longest n-grams, and the weight of recall relative to precision


class RerankPlan(NamedTuple):
    """How a lane's samples are reranked, and how many of them are returned."""

    kind: Literal["best_of", "mbr"]
    samples: int
    returned: int
    length_penalty: float = 1.0  # best_of: the score is logprob / tokens ** length_penalty


def rerank(
    hypotheses: Sequence[events.Hypothesis], texts: Sequence[str], plan: RerankPlan
) -> tuple[events.Hypothesis, ...]:
    """The hypotheses, best first, each with its score.

    best_of: log-probability / tokens ** length_penalty, by default the mean per token, because the sum prefers short
    texts. mbr: the expected utility, chrF in [0, 1] against all samples, itself included, as often as each was sampled
    (Eikema and Aziz 2020, arXiv:2005.10283, section 6); ties are ordered by log-probability. Equal hypotheses stay in
    the order in which they were sampled.
    """
    if plan.kind == "best_of":
        scores = [one.logprob / max(len(one.tokens), 1) ** plan.length_penalty for one in hypotheses]
    else:
        scores = expected_chrf(texts)
    ranked = sorted(zip(scores, hypotheses, strict=True), key=lambda pair: (-pair[0], -pair[1].logprob))
    return tuple(dataclasses.replace(hypothesis, score=score) for score, hypothesis in ranked)


def expected_chrf(texts: Sequence[str]) -> list[float]:
    """For each text, its mean chrF with all texts as references. Equal texts are compared once."""
    counts = Counter(texts)
    grams = {text: _ngrams(text) for text in counts}
    totals = {text: float(count) for text, count in counts.items()}  # chrF with itself is 1, for each draw
    for one, other in combinations(counts, 2):
        of_one, of_other = _chrf(grams[one], grams[other])
        totals[one] += counts[other] * of_one
        totals[other] += counts[one] * of_other
    return [totals[text] / len(texts) for text in texts]


def _ngrams(text: str) -> list[Counter[str]]:
    """The n-grams of a text without white space, for n = 1 to 6."""
    characters = "".join(text.split())
    return [Counter(characters[at : at + n] for at in range(len(characters) - n + 1)) for n in range(1, ORDER + 1)]


def _chrf(left: list[Counter[str]], right: list[Counter[str]]) -> tuple[float, float]:
    """The chrF of two texts, each with the other as reference, from their n-grams.

    Character n-gram F-score in [0, 1] (Popović 2015, W15-3049): n = 1 to 6, beta = 2, white space not counted.
    Precision and recall are averaged over the n for which both texts are long enough, as in sacrebleu.
    """
    lengths = left[0].total(), right[0].total()  # characters: n - 1 fewer n-grams
    orders = min(ORDER, *lengths)
    matches = [(one & other).total() for one, other in zip(left, right, strict=True)]
    if not orders or not matches[0]:
        equal = float(lengths == (0, 0))  # two texts without characters
        return equal, equal
    # the precision of one is the recall of the other
    shares = [sum(matches[n] / (length - n) for n in range(orders)) / orders for length in lengths]
    scores = [
        (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall)
        for precision, recall in (shares, reversed(shares))
    ]
    return scores[0], scores[1]


class ForcedPhrase(NamedTuple):
    """One constraint as the user gave it: alternative texts, or alternative ids."""

    name: str
    texts: tuple[str, ...]  # empty if the ids have no text
    literal: bool  # whether it was given as texts, which any tokens may spell


@dataclass(frozen=True)
class ForcedPhrases:
    """The constraints of one lane."""

    constraints: Constraints
    phrases: tuple[ForcedPhrase, ...]
    text: Callable[[Sequence[int]], str]  # decodes ids

    def unmet(self, hypothesis: Hypothesis) -> Hypothesis:
        """The hypothesis with the names of the phrases that it lacks.

        A phrase must be in the tokens, or in the text if it was given as text; if a stop cut the text, in what is left.
        """
        lacking = self.constraints.open_in(hypothesis.tokens)
        cut = hypothesis.reason == "stop" and self.text(hypothesis.tokens) != hypothesis.text
        unmet = []
        for place, phrase in enumerate(self.phrases):
            times = self.phrases[: place + 1].count(phrase)
            present = sum(hypothesis.text.count(text) for text in phrase.texts) >= times
            if (place in lacking and not (phrase.literal and present)) or (cut and phrase.texts and not present):
                unmet.append(phrase.name)
        return dataclasses.replace(hypothesis, unmet=tuple(unmet)) if unmet else hypothesis


def forced_phrases(generation: Generation, strategy: Strategy, tokenizer: Any, words: Words) -> ForcedPhrases | None:
    """What the texts of a constrained beam search must contain: `force_words_ids`, then `force_words`.

    A name joins the alternatives with "|"; ids without text are written as numbers.
    """
    from genctl.models.text import decode
    from genctl.strategies.constrained import ConstrainedBeam
    from genctl.strategies.constraints import Constraints

    if not isinstance(strategy, ConstrainedBeam):
        return None
    phrases = []
    for constraint in generation.force_words_ids or []:
        lists = [item for item in constraint if isinstance(item, list)]
        several = lists or [[id for id in constraint if isinstance(id, int)]]
        texts = ["" if tokenizer is None else decode(tokenizer, ids).strip() for ids in several]
        name = " | ".join(text or str(ids) for text, ids in zip(texts, several, strict=True))
        phrases.append(ForcedPhrase(name, tuple(texts) if all(texts) else (), False))
    for word in generation.force_words or []:
        alternatives = [word] if isinstance(word, str) else word
        texts = [one.strip() or one for one in alternatives]
        phrases.append(ForcedPhrase(" | ".join(alternatives), tuple(texts), True))
    return ForcedPhrases(Constraints(strategy.words), tuple(phrases), words.decode)


@dataclass(frozen=True)
class LaneResults:
    """Completes one lane's results."""

    phrases: ForcedPhrases | None = None
    grammar: Grammar | None = None
    prompt_length: int = 0  # tokens of the prompt, for `grammar`
    ranking: RerankPlan | None = None
    thinking: Thinking | None = None

    def completed(self, event: Event) -> Event:
        """The event, with its results completed."""
        if isinstance(event, Stepped) and event.ended and self.phrases is not None:
            ended = (dataclasses.replace(row, hypothesis=self.phrases.unmet(row.hypothesis)) for row in event.ended)
            return dataclasses.replace(event, ended=tuple(ended))
        if not isinstance(event, Finished):
            return event
        hypotheses = tuple(map(self._completed, event.hypotheses))
        if self.ranking is None:
            return dataclasses.replace(event, hypotheses=hypotheses)
        ranked = rerank(hypotheses, [hypothesis.text for hypothesis in hypotheses], self.ranking)
        returned = self.ranking.returned
        return dataclasses.replace(event, hypotheses=ranked[:returned], others=ranked[returned:])

    def _completed(self, hypothesis: Hypothesis) -> Hypothesis:
        """The hypothesis with its missing phrases and its thought; marked as incomplete if a limit (tokens, context or
        time) cut the text off before it was complete in the grammar.
        """
        if self.phrases is not None:
            hypothesis = self.phrases.unmet(hypothesis)
        if self.thinking is not None:
            thought = self.thinking.of(hypothesis.tokens)
            hypothesis = dataclasses.replace(hypothesis, thought=thought.tokens, thought_cut=thought.cut)
        grammar = self.grammar
        if grammar is not None and hypothesis.reason in CUT and grammar.cut(hypothesis.tokens, self.prompt_length):
            return dataclasses.replace(hypothesis, incomplete=grammar.source.knob)
        return hypothesis

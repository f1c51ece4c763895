"""Metrics of a text: probability, diversity, repetition, similarity to references. Plain numbers, or None if
undefined.

A word is a run of letters and digits, or any other single character, so texts of different tokenizers can be
compared.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

from genctl import events
from genctl.config import reader
from genctl.config.reader import Unreadable
from genctl.errors import InputError, UsageError, cannot_read, count, extra
from genctl.events import shared_length
from genctl.events.results import Sequence as Written
from genctl.io.records import known_id

Values: TypeAlias = dict[str, float | None]

_WORD = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """The words of a text, as defined above."""
    return _WORD.findall(text)


def measure(written: Written) -> Values:
    """The metrics of one sequence; None for numbers that a server does not report.

    `tokens` (with EOS); `mean_logprob` per token under the model, nats; `perplexity`; `score`, the search's own;
    `entropy`, the mean of the model's distributions, nats; `distinct_1` and `distinct_2`, the shares of distinct words
    and pairs of words (Li et al. 2016, arXiv:1510.03055); `longest_repeat`, the length in words of the longest n-gram
    that occurs twice, overlaps allowed.
    """
    hypothesis = written.hypothesis
    count = hypothesis.length
    mean = hypothesis.logprob / count if count and not math.isnan(hypothesis.logprob) else None
    entropies = [token.entropy for token in written.tokens if token.entropy is not None]
    spoken = words(hypothesis.text)
    return {
        "tokens": count,
        "mean_logprob": mean,
        "perplexity": None if mean is None else perplexity(mean),
        "score": None if math.isnan(hypothesis.score) else hypothesis.score,
        "entropy": sum(entropies) / len(entropies) if entropies else None,
        "distinct_1": distinct(spoken, 1),
        "distinct_2": distinct(spoken, 2),
        "longest_repeat": longest_repeat(spoken),
    }


def perplexity(mean_logprob: float) -> float:
    """exp of the mean negative log-probability; infinite on overflow."""
    try:
        return math.exp(-mean_logprob)
    except OverflowError:
        return math.inf


def distinct(items: Sequence[str], n: int) -> float | None:
    """Distinct n-grams as a share of all n-grams; None if there are none."""
    grams = [tuple(items[start : start + n]) for start in range(len(items) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def longest_repeat(items: Sequence[Hashable]) -> int:
    """The length of the longest n-gram that occurs twice, overlaps allowed; 0 if there is none.

    Items are mapped to characters, so `str.find` can search for an n-gram one longer than the longest so far.
    """
    numbers: dict[Hashable, int] = {}
    text = "".join([chr(numbers.setdefault(item, len(numbers))) for item in items])
    longest = 0
    for start in range(len(text)):
        while text.find(text[start : start + longest + 1], start + 1) >= 0:
            longest += 1
    return longest


def mean_of(values: Sequence[Mapping[str, float | None]]) -> Values:
    """The mean of each number over several texts, without missing values.

    The perplexity is computed from the mean log-probability.
    """
    means: Values = {}
    for key in dict.fromkeys(key for numbers in values for key in numbers):
        known = [value for numbers in values if (value := numbers.get(key)) is not None]
        means[key] = sum(known) / len(known) if known else None
    mean = means.get("mean_logprob")
    if "perplexity" in means and mean is not None:
        means["perplexity"] = perplexity(mean)
    return means


@dataclass(frozen=True)
class Divergence:
    """Where a text diverges from another one. A token is None if its text has ended.

    If one checkpoint generated both texts, both log-probabilities are the model's own after the same tokens.
    """

    against: str  # the run of the other text
    position: int  # tokens of this text before the difference
    character: int  # characters of this text before the difference
    token: events.Token | None
    other: events.Token | None


def divergence(ours: Written, theirs: Written, against: str, *, same_tokens: bool) -> Divergence | None:
    """The first point at which two sequences differ; None if they are equal.

    With `same_tokens` ids are compared. Else (texts of different checkpoints) characters are compared, and the point
    is moved back to the beginning of the token that contains the first difference.
    """
    one, other = ours.hypothesis, theirs.hypothesis
    if one.tokens == other.tokens if same_tokens else one.text == other.text:
        return None
    if same_tokens:
        here = there = shared_length(one.tokens, other.tokens)
    else:
        common = shared_length(one.text, other.text)
        here, there = _holding(ours, common), _holding(theirs, common)
    character = sum(len(token.text) for token in ours.tokens[:here])
    first, second = next(iter(ours.tokens[here:]), None), next(iter(theirs.tokens[there:]), None)
    return Divergence(against, here, character, first, second)


def _holding(written: Written, character: int) -> int:
    """The index of the token that contains a character."""
    ends = accumulate(len(token.text) for token in written.tokens)
    return next((place for place, end in enumerate(ends) if end > character), len(written.tokens))


def divergence_entry(point: Divergence) -> dict[str, object]:
    """A divergence for a record: `token` and `other` as [id, text, logprob], or null after the end."""

    def entry(token: events.Token | None) -> list[object] | None:
        return None if token is None else [known_id(token.id), token.text, token.logprob]

    return {"run": point.against, "position": point.position, "token": entry(point.token), "other": entry(point.other)}


# -- texts against references, and samples against each other: exact match, BLEU, chrF, TER (sacrebleu, an extra) ------
# BLEU (Papineni et al. 2002), chrF (Popović 2015) and TER (Snover et al. 2006) are on sacrebleu's scale of 0 to 100
# with its default settings; BLEU of a single sentence omits n-gram orders that are longer than the sentence
# (`effective_order`).


def is_installed() -> bool:
    """Whether sacrebleu is installed."""
    return importlib.util.find_spec("sacrebleu") is not None


def check_installed(what: str) -> None:
    """Raises UsageError, saying that `what` needs sacrebleu, if it is not installed."""
    if not is_installed():
        raise UsageError(
            f"{what}: scores against references need sacrebleu, which is not installed", hint=extra("metrics")
        )


@cache
def _scorers() -> dict[str, Any]:
    """Metrics of sacrebleu for single sentences, by column."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    return {"chrf": CHRF(), "bleu": BLEU(effective_order=True, force=True), "ter": TER()}


def _bounded(scores: Mapping[str, Any]) -> Values:
    """The numbers of sacrebleu's scores, capped at 100 (they may be 100.00000000000004) except TER."""
    return {name: float(one.score) if name == "ter" else min(float(one.score), 100.0) for name, one in scores.items()}


def against(text: str, references: Sequence[str]) -> Values:
    """Scores of one text against its references; exact match ignores leading and trailing white space."""
    exact = text.strip() in {reference.strip() for reference in references}
    scores = {name: scorer.sentence_score(text, list(references)) for name, scorer in _scorers().items()}
    return {"exact_match": float(exact), **_bounded(scores)}


def corpus(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Values:
    """The scores of all texts of a run as one corpus, which differ from the mean over the texts; `references[i]` belong
    to `texts[i]`.
    """
    from sacrebleu.metrics.bleu import BLEU

    most = max(map(len, references))
    streams: Any = [[texts[place] if place < len(texts) else None for texts in references] for place in range(most)]
    scorers = {**_scorers(), "bleu": BLEU(force=True)}
    return _bounded({name: scorer.corpus_score(list(texts), streams) for name, scorer in scorers.items()})


def self_bleu(texts: Sequence[str]) -> list[float | None]:
    """The BLEU of each text with all others as references (Zhu et al. 2018, arXiv:1802.01886): 100 for equal texts.

    None for a single text, and without sacrebleu.
    """
    if len(texts) < 2 or not is_installed():
        return [None] * len(texts)
    bleu = _scorers()["bleu"]
    return [
        _bounded({"": bleu.sentence_score(text, [*texts[:place], *texts[place + 1 :]])})[""]
        for place, text in enumerate(texts)
    ]


def read(path: str, prompts: int) -> list[str]:
    """One reference per line, as many as there are prompts. Raises InputError."""
    try:
        text = reader.text(path)
    except Unreadable as error:
        raise InputError(cannot_read(path, error)) from None
    lines = reader.text_lines(text)
    if len(lines) != prompts:
        raise InputError(f"{path} has {count(len(lines), 'reference')}, one per line, for {count(prompts, 'prompt')}")
    return lines

"""Drafters: a smaller model with the same tokens, the model's first layers, or earlier texts.

A drafter is shared by lanes; `begin` returns a `DraftWriter` for one lane. `Assisted` verifies every proposal, so a bad
drafter only costs time. Without a model, a draft is the tokens that followed an earlier occurrence of the last tokens,
in the row or in other texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from genctl.decode.read_along import ReadAlong
from genctl.decode.runtime import ModelRuntime, Pass, depth_of
from genctl.decode.step_costs import PassPrice
from genctl.decode.types import Context, Draft
from genctl.errors import ModelError
from genctl.events import shared_length
from genctl.params import MOST_MATCHED

MEMORY = 0.97  # weight of a trial relative to the next one
SELDOM = 32  # most steps between two calls of a drafter without a model that does not pay


@dataclass
class Rate:
    """A share of trials that succeed. Newer trials weigh more; the first guess counts as one trial."""

    successes: float
    failures: float

    @classmethod
    def guess(cls, rate: float) -> Rate:
        return cls(rate, 1.0 - rate)

    @property
    def value(self) -> float:
        return self.successes / (self.successes + self.failures)

    def observe(self, successes: int, failures: int) -> None:
        """Record `successes` trials that succeed, then `failures` that do not."""
        for success in (True,) * successes + (False,) * failures:
            self.successes = self.successes * MEMORY + success
            self.failures = self.failures * MEMORY + (not success)


def promise(rates: Sequence[Rate]) -> list[float]:
    """The expected number of accepted tokens of a draft of 1, 2, … tokens."""
    likely, promised, total = 1.0, [], 0.0
    for rate in rates:
        likely *= rate.value
        total += likely
        promised.append(total)
    return promised


def learn(rates: Sequence[Rate], right: int) -> None:
    """Update the rates of a draft of which the first `right` tokens were right, and the one after them was not."""
    for rate in rates[:right]:
        rate.observe(1, 0)
    for rate in rates[right : right + 1]:
        rate.observe(0, 1)


def seldom(price: PassPrice) -> int:
    """The interval, in steps, at which a drafter without a model is called while drafts do not pay."""
    return max(1, min(int(100 * price.draft_overhead), SELDOM))


# (scores f32 [1, V] after the processors, number of new tokens before) -> the token that is drawn
Draw: TypeAlias = Callable[[Tensor, int], int]


# (text, count) -> at most `count` (at least 1) tokens that may follow `text`, which only grows between calls
DraftWriter: TypeAlias = Callable[[Sequence[int], int], Draft]


class Drafter(Protocol):
    """A drafter. One with a model has it as `forward`. `begin` raises ModelError if it cannot draft for a lane.

    A drafter that learns from the texts of a run has `keep(tokens)`. Drafts without a model come with `rates`.
    """

    @property
    def kind(self) -> str: ...

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        """The writer for one lane. Without `draw` a model takes the most probable tokens.

        It stops early after a token with a probability below `confidence`.
        """
        ...


@dataclass(frozen=True)
class ModelDrafter:
    """Another model with the same tokens drafts (arXiv:2211.17192, arXiv:2302.01318).

    Its scores pass through the lane's processors too, so that it predicts the choice. An encoder-decoder
    drafts for an encoder-decoder, with its own encoder.
    """

    forward: ModelRuntime
    kind: str = "assisted"
    depth: int = 0  # the number of layers, if it is the first layers of the model itself

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        if self.forward.is_encoder_decoder != context.model.is_encoder_decoder:
            kinds = "a decoder-only model", "an encoder-decoder"
            model, assistant = (kinds[one.is_encoder_decoder] for one in (context.model, self.forward))
            raise ModelError(f"{model} needs an assistant of the same kind, and the assistant is {assistant}")
        source = context.prefix.source
        if source is not None:
            source = self.forward.encode(source.ids[0].tolist())
        tokens, cache = context.prefix.tokens[0].tolist(), context.prefix.cache
        if self.depth and cache is not None:  # it starts with the first layers of the prompt's cache
            part = cache.with_layers(cache.layers[: self.depth])
            follower = ReadAlong(self.forward, cuts=True, cache=part, read=tokens)
            return ModelDraftWriter(follower, context, draw, confidence)
        follower = ReadAlong(self.forward, use_cache=cache is not None, cuts=True, source=source)
        if follower.cached:  # a cache that cannot be cropped is refused before the first step
            follower([tokens])
        return ModelDraftWriter(follower, context, draw, confidence)


class ModelDraftWriter:
    """Drafts by a model that reads the row."""

    def __init__(self, follower: ReadAlong, context: Context, draw: Draw | None, confidence: float) -> None:
        self.follower = follower
        self.context = context
        self.draw = draw
        self.confidence = confidence
        self.length = follower.length  # of the row at the last call
        self.drafted: list[int] = []  # tokens of the last draft

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        follower, eos = self.follower, self.context.eos
        agreed = shared_length(text[self.length :], self.drafted)
        follower.cut(min(self.length + agreed, follower.length, len(text) - 1))
        logits = follower([text])[0]
        tokens: list[int] = []
        before = len(text) - self.context.prefix.tokens.shape[1]
        while True:
            scores = self._scores(text, tokens, logits)
            distribution = scores[0].softmax(-1)
            token = int(distribution.argmax()) if self.draw is None else self.draw(scores, before + len(tokens))
            tokens.append(token)
            if len(tokens) == count or token in eos or float(distribution[token]) < self.confidence:
                break
            logits = follower([[*text, *tokens]])[0]
        self.length, self.drafted = len(text), tokens
        return Draft(tokens)

    def _scores(self, text: Sequence[int], tokens: list[int], logits: Tensor) -> Tensor:
        """f32 [1, V] over the target's vocabulary, after the processors; -inf for tokens that the assistant lacks."""
        wanted = self.context.prefix.logits
        size = wanted.shape[-1]
        logits = logits[:size].to(wanted.device)
        if len(logits) < size:
            logits = torch.nn.functional.pad(logits, (0, size - len(logits)), value=-torch.inf)
        scores = logits[None]
        if self.context.processors:
            history = torch.tensor([[*text, *tokens]], device=wanted.device)
            for process in self.context.processors:
                scores = process(history, scores)
        return scores


def early_exit(forward: ModelRuntime, layer: int, *, use_cache: bool = True) -> ModelDrafter:
    """The model's first layers, followed by its head, draft (LayerSkip, arXiv:2404.16710), and share its weights.

    Raises ModelError if the architecture does not allow it. Tries one token, because some models need all layers: their
    inputs have a part for each layer (Gemma 3n). A cache without an attention layer (LFM2) is refused later.
    """
    if forward.is_encoder_decoder:
        raise ModelError(f"assistant_early_exit needs a decoder-only model, and {forward.name} is an encoder-decoder")
    depth = depth_of(forward)
    if not 1 <= layer < depth:
        raise ModelError(
            f"assistant_early_exit = {layer}: {forward.name} has {depth} layers, so it can leave after 1 to {depth - 1}"
        )
    part = forward.first_layers(layer)
    cache = forward.new_cache() if use_cache and forward.abilities.supports_cache else None
    if cache is None or cache.is_croppable:  # drafting needs a croppable cache
        cut = None if cache is None else cache.with_layers(cache.layers[:layer])
        try:
            part(Pass(torch.zeros(1, 1, dtype=torch.long, device=part.device), cut, first=True))
        except ValueError:
            pass  # no layer with attention: `decode.choose` refuses drafts with a cache of states
        except ModelError as error:
            problem = f"{forward.name} cannot run with its first layers alone"
            raise ModelError(f"assistant_early_exit = {layer}: {problem}") from error
    return ModelDrafter(part, "early-exit", layer)


MOST_COMPARED = 64  # tokens of context; longer ones rarely help, and each token costs time and memory
MOST_KEPT = 2**17  # tokens of other texts; if there are more, the older half is dropped
LEAST_LIKELY = 0.05  # a draft ends when the probability that all of it is right is below this
SURE = 4  # length of the context that must be known before anything is drafted, if steps are short
END = -1  # between two texts
OFTEN = 3  # counts of repeats and of changes saturate here
# state (streak << 2 | changes) -> the state after the same token followed again, and after another one did
AGAIN = [min(state + 4, OFTEN << 2 | state & OFTEN) for state in range(16)]
CHANGED = [min((state & OFTEN) + 1, OFTEN) for state in range(16)]


class Index:
    """The token that last followed each context of 1, 2, 4, … `longest` tokens of a text, as in a branch predictor.

    A longer context is trusted before a shorter one (Seznec and Michaud 2006, "A case for (partially) tagged geometric
    history length branch prediction"). Its reliability is learned for each kind of context (`rate_of`).
    """

    def __init__(self, longest: int, tokens: Iterable[int] = ()) -> None:
        longest = min(longest, MOST_COMPARED)
        self.lengths = [length for length in (1, 2, 4, 8, 16, 32) if length < longest] + [longest]
        # for each length: hash of the context -> the token after it << 4 | its state (see `AGAIN`)
        self.tables: list[dict[int, int]] = [{} for _ in self.lengths]
        self.taken = [0 for _ in self.lengths]  # tokens that are in the table
        self.tokens = list(tokens)

    def after(self, key: int, place: int) -> int | None:
        """The table entry of the context with this hash, of the `place`-th length; None if it is unknown."""
        if self.taken[place] < len(self.tokens):
            self._take(place)
        return self.tables[place].get(key)

    def _take(self, place: int) -> None:
        tokens, length, table = self.tokens, self.lengths[place], self.tables[place]
        begin, end, get = max(self.taken[place], length), max(len(tokens), length), table.get
        before = [tokens[begin - length + skip : end - length + skip] for skip in range(length)]
        for key, token in zip(map(hash, zip(*before, strict=True)), tokens[begin:], strict=True):
            known = get(key)
            if known is None:
                table[key] = token << 4
            else:
                table[key] = token << 4 | (AGAIN if known >> 4 == token else CHANGED)[known & 15]
        self.taken[place] = len(tokens)


def rate_of(rates: dict[int, Rate], length: int, state: int, *, own: bool) -> Rate:
    """How often the last continuation of a context of `length` tokens repeats, by its `state` (see `AGAIN`).

    The row's `own` text and the other texts have separate rates, which are learned as drafts are verified.
    """
    key = length << 5 | state << 1 | own
    if key not in rates:
        guess = 0.35 + 0.06 * min(length, 8) + 0.1 * (state >> 2) - 0.15 * bool(state & OFTEN)
        rates[key] = Rate.guess(min(guess, 0.95))
    return rates[key]


@dataclass(frozen=True)
class PromptLookup:
    """Drafts from the row itself (github.com/apoorvumang/prompt-lookup-decoding).

    Up to `max_matching_ngram_size` of the last tokens are compared. An encoder-decoder's source is searched, too. No
    EOS is drafted, and no processor is applied.
    """

    max_matching_ngram_size: int = MOST_MATCHED

    kind: ClassVar[str] = "prompt-lookup"

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        return LookupDraftWriter(self.max_matching_ngram_size, _source(context), context.eos)


@dataclass(eq=False)
class SuffixDrafter:
    """Drafts from the row itself and from the texts of a run: those given before it, and rows that have ended."""

    texts: Index = field(default_factory=lambda: Index(MOST_MATCHED))
    rates: dict[int, Rate] = field(default_factory=dict)

    kind: ClassVar[str] = "suffix"

    def keep(self, tokens: Sequence[int]) -> None:
        """Add a text to draft from. It is indexed at the next lookup."""
        if tokens:
            self.texts.tokens += [*tokens, END]
        if len(self.texts.tokens) > MOST_KEPT:
            self.texts = Index(MOST_MATCHED, self.texts.tokens[-MOST_KEPT // 2 :])

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        agree = SURE if seldom(context.model.pass_price) == SELDOM else 0
        return LookupDraftWriter(MOST_MATCHED, _source(context), context.eos, self, agree)


def _source(context: Context) -> list[int]:
    source = context.prefix.source
    return [] if source is None else source.ids[0].tolist()


class LookupDraftWriter:
    """Drafts token by token what last followed the longest suffix of the text known from the row or from `others`.

    With `others` a draft ends where it becomes improbable. Nothing is drafted unless the last `agree` tokens are known.
    """

    def __init__(
        self,
        longest: int,
        before: Iterable[int],
        eos: Sequence[int],
        others: SuffixDrafter | None = None,
        agree: int = 0,
    ) -> None:
        self.never, self.others, self.agree = {*eos, END}, others, agree
        self.rates: dict[int, Rate] = {} if others is None else others.rates
        self.own = Index(longest, before)
        self.taken = 0  # tokens of the text in `own`

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        own = self.own
        own.tokens += text[self.taken :]
        self.taken = len(text)
        lengths = [*enumerate(own.lengths)]
        end = own.tokens[-own.lengths[-1] :]
        tokens: list[int] = []
        rates: list[Rate] = []
        if self.agree and self._next(end, [place for place in lengths if place[1] == self.agree]) is None:
            return Draft(tokens)
        lengths.reverse()
        likely, least = 1.0, 0.0 if self.others is None else LEAST_LIKELY
        while len(tokens) < count and likely >= least:
            found = self._next(end, lengths)
            if found is None or found[0] in self.never:
                break
            token, rate = found
            tokens.append(token)
            rates.append(rate)
            likely *= rate.value
            end.append(token)
        return Draft(tokens, rates)

    def _next(self, end: Sequence[int], lengths: Iterable[tuple[int, int]]) -> tuple[int, Rate] | None:
        known = [self.own] if self.others is None else [self.own, self.others.texts]
        for place, length in lengths:
            if length > len(end):
                continue
            key = hash(tuple(end[-length:]))
            for index in known:
                value = index.after(key, place)
                if value is not None:
                    return value >> 4, rate_of(self.rates, length, value & 15, own=index is self.own)
        return None

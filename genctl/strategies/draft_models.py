"""Sources of drafts: a smaller model with the same tokens, or the text itself (prompt lookup).

A drafter is immutable and shared by lanes; `begin` returns a `DraftWriter` for one lane. `Assisted` verifies every
proposal, so a bad drafter only costs time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.runtime import ModelRuntime, Pass
from genctl.decode.types import Context, Source, Sources
from genctl.errors import ModelError
from genctl.sequences import shared_length


@dataclass(frozen=True)
class Draft:
    """Proposed tokens."""

    tokens: list[int]  # D
    distributions: Tensor | None = None  # f32 [D, V] that each token was sampled from; None if greedy


class DraftWriter(Protocol):
    """Drafts for one lane."""

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        """At most `count` (at least 1) tokens that may follow `text`, which only grows between two calls."""
        ...


class Drafter(Protocol):
    """A way to draft; one by a model has it as `forward`. `begin` raises ModelError if it cannot draft for a lane."""

    @property
    def kind(self) -> str: ...

    def begin(self, context: Context, do_sample: bool, confidence: float) -> DraftWriter:
        """The writer for one lane. It stops early after a token with a probability below `confidence`."""
        ...


class CachedReader:
    """A model that reads one growing text with a cache, so that no token is read twice.

    Raises ModelError if the model's cache cannot be rewound.
    """

    def __init__(
        self,
        forward: ModelRuntime,
        *,
        use_cache: bool = True,
        source: Source | None = None,
        cache: Cache | None = None,
        ids: Sequence[int] = (),
    ) -> None:
        self.forward = forward
        self.cached = use_cache and forward.abilities.supports_cache
        self.sources = None if source is None else Sources(source.states, None, None)
        self.cache = cache if cache is not None else self._empty()
        self.ids = list(ids)  # tokens read so far
        self.floor = len(self.ids)  # windows cannot restore columns dropped before this length

    def _empty(self) -> Cache | None:
        if not self.cached:
            return None
        cache = self.forward.new_cache()
        cache.activate_past_recording()
        return cache

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read at least one more token. Returns the logits of the next one, f32 [V]."""
        first = not self.ids or self.cache is None
        self.ids += tokens
        feed = torch.tensor([self.ids if self.cache is None else list(tokens)], device=self.forward.device)
        text = None
        if self.forward.wants_history(len(self.ids) - len(tokens)):
            text = torch.tensor([self.ids], device=self.forward.device)
        output = self.forward(Pass(feed, self.cache, sources=self.sources, first=first, keep=1, history=text))
        if self.cache is not None and not self.cache.is_croppable:
            raise ModelError(f"{self.forward.name} cannot draft: it keeps recurrent states, which forget nothing")
        return output.logits[0, -1]

    def rewind(self, length: int) -> None:
        """Drop all but the first `length` tokens."""
        surplus = len(self.ids) - length
        if self.cache is not None:
            if length == 0 or (self.cache.records_past and length < self.floor):
                known, self.ids, self.cache = self.ids[:length], [], self._empty()
                if known:
                    self.read(known)
            else:
                self.cache.crop(surplus)
        del self.ids[length:]
        self.floor = length


@dataclass(frozen=True)
class ModelDrafter:
    """Another model with the same tokens drafts (arXiv:2211.17192, arXiv:2302.01318).

    Its scores pass through the lane's processors too, so that it predicts the choice. An encoder-decoder
    drafts for an encoder-decoder, with its own encoder.
    """

    forward: ModelRuntime

    kind: ClassVar[str] = "assisted"

    def begin(self, context: Context, do_sample: bool, confidence: float) -> DraftWriter:
        if self.forward.is_encoder_decoder != context.model.is_encoder_decoder:
            model_shape, drafter_shape = (_shape(model) for model in (context.model, self.forward))
            raise ModelError(f"{model_shape} needs an assistant of its own kind, and the assistant is {drafter_shape}")
        source = context.prefix.source
        if source is not None:
            source = self.forward.encode(source.ids[0].tolist())
        follower = CachedReader(self.forward, use_cache=context.prefix.cache is not None, source=source)
        return ModelDraftWriter(follower, context, do_sample, confidence)


class ModelDraftWriter:
    """Drafts by a model that reads the row."""

    def __init__(self, follower: CachedReader, context: Context, do_sample: bool, confidence: float) -> None:
        self.follower = follower
        self.context = context
        self.do_sample = do_sample
        self.confidence = confidence
        self.length = len(follower.ids)  # of the row at the last call
        self.drafted: list[int] = []  # tokens of the last draft

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        follower, eos = self.follower, self.context.eos
        agreed = shared_length(text[self.length :], self.drafted)
        follower.rewind(min(self.length + agreed, len(follower.ids), len(text) - 1))
        logits = follower.read(text[len(follower.ids) :])
        tokens: list[int] = []
        distributions: list[Tensor] = []
        while True:
            distribution = self._distribution(text, tokens, logits)
            if self.do_sample:
                token = int(torch.multinomial(distribution, 1, generator=self.context.rng))
                distributions.append(distribution)
            else:
                token = int(distribution.argmax())
            tokens.append(token)
            # the unsure token stays: dropping it depending on its value would bias the distribution
            if len(tokens) == count or token in eos or float(distribution[token]) < self.confidence:
                break
            logits = follower.read([token])
        self.length, self.drafted = len(text), tokens
        return Draft(tokens, torch.stack(distributions) if distributions else None)

    def _distribution(self, text: Sequence[int], tokens: list[int], logits: Tensor) -> Tensor:
        """f32 [V] over the target's vocabulary: tokens that the assistant lacks have probability 0."""
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
        return scores[0].softmax(-1)


@dataclass(frozen=True)
class PromptLookup:
    """The continuation of the newest n-gram at its first earlier occurrence
    (github.com/apoorvumang/prompt-lookup-decoding).

    The longest n-gram is used, up to `max_matching_ngram_size`. An encoder-decoder's source is searched before its
    output. No EOS is drafted, and no processor is applied.
    """

    max_matching_ngram_size: int = 2

    kind: ClassVar[str] = "prompt-lookup"

    def begin(self, context: Context, do_sample: bool, confidence: float) -> DraftWriter:
        source = context.prefix.source
        return LookupDraftWriter(
            self.max_matching_ngram_size, [] if source is None else source.ids[0].tolist(), context.eos
        )


class LookupDraftWriter:
    """An index of the first occurrence of every n-gram, which grows with the row."""

    def __init__(self, longest: int, before: Iterable[int], eos: Sequence[int]) -> None:
        self.eos = frozenset(eos)
        self.text = list(before)
        self.taken = 0  # tokens of the row in `text`
        self.indexed = 0  # n-grams that end before this place are indexed
        self.first: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]  # n-gram of size i+1 -> its end

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        self.text += text[self.taken :]
        self.taken = len(text)
        text, length = self.text, len(self.text)
        for end in range(self.indexed + 1, length):  # each has a following token
            for size, known in enumerate(self.first[:end], 1):
                known.setdefault(tuple(text[end - size : end]), end)
        self.indexed = max(self.indexed, length - 1)
        for size in range(min(len(self.first), length - 1), 0, -1):
            place = self.first[size - 1].get(tuple(text[length - size :]))
            if place is not None:
                tokens = text[place : place + count]
                stop = next((i for i, token in enumerate(tokens) if token in self.eos), len(tokens))
                return Draft(tokens[:stop])
        return Draft([])


def _shape(forward: ModelRuntime) -> str:
    return "an encoder-decoder" if forward.is_encoder_decoder else "a decoder-only model"

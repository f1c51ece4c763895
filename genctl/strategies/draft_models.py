"""Where drafts come from: a smaller model with the same tokens, or the text itself (prompt lookup).

A drafter is a frozen value that any number of lanes may share; `begin` gives each lane one that works for it alone.
Whatever a drafter proposes, `Assisted` writes what the model would have written: a bad drafter only costs time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from genctl.decode import cache as caches
from genctl.decode.encoder_inputs import Sources
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Context, Source
from genctl.errors import ModelError


@dataclass(frozen=True)
class Draft:
    """Tokens on trial."""

    tokens: list[int]  # D
    distributions: Tensor | None = None  # f32 [D, V], what each token was drawn from; None where nothing was drawn


class Drafting(Protocol):
    """A drafter at work for one lane."""

    def __call__(self, row: Tensor, count: int) -> Draft:
        """At most `count` (at least 1) tokens that may follow row int64 [T]. The row only grows between two calls."""
        ...


class Drafter(Protocol):
    """A way to draft. `begin` raises ModelError where it cannot draft for the lane's model."""

    @property
    def kind(self) -> str: ...

    def begin(self, context: Context, do_sample: bool, confidence: float) -> Drafting:
        """A drafter for one lane. It stops early after a token of which it was less sure than `confidence`."""
        ...


class Follower:
    """A model that reads along with one text, in a cache of its own: what it has read is not read again.

    Raises ModelError when the model's cache cannot take anything back.
    """

    def __init__(
        self,
        forward: ModelRuntime,
        *,
        use_cache: bool = True,
        source: Source | None = None,
        cache: Any = None,
        ids: Sequence[int] = (),
    ) -> None:
        self.forward = forward
        self.cached = use_cache and forward.supports_cache
        self.sources = None if source is None else Sources(source.states, None, None)
        self.cache = cache if cache is not None else self._empty()
        self.ids = list(ids)  # what has been read
        self.floor = len(self.ids)  # windows do not remember what they dropped before this length

    def _empty(self) -> Any:
        if not self.cached:
            return None
        return caches.rewindable(self.forward.new_cache())

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read on: at least one token. Returns the logits of what follows, f32 [V]."""
        first = not self.ids or self.cache is None
        self.ids += tokens
        feed = torch.tensor([self.ids if self.cache is None else list(tokens)], device=self.forward.device)
        whole = None
        if self.forward.wants_history(len(self.ids) - len(tokens)):
            whole = torch.tensor([self.ids], device=self.forward.device)
        output = self.forward(feed, self.cache, sources=self.sources, first=first, keep=1, history=whole)
        if self.cache is not None and not caches.croppable(self.cache):
            raise ModelError(f"{self.forward.name} cannot draft: it keeps recurrent states, which forget nothing")
        return output.logits[0, -1]

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        surplus = len(self.ids) - length
        if self.cache is not None:
            windowed = any(getattr(layer, "record_past", False) for layer in caches.self_part(self.cache).layers)
            if length == 0 or (windowed and length < self.floor):
                known, self.ids, self.cache = self.ids[:length], [], self._empty()
                if known:
                    self.read(known)
            else:
                caches.crop(self.cache, surplus)
        del self.ids[length:]
        self.floor = length


@dataclass(frozen=True)
class ModelDrafter:
    """Another model with the same tokens writes ahead (arXiv:2211.17192, arXiv:2302.01318).

    Its scores go through the lane's processors too, so that it guesses at what will be chosen. An encoder-decoder
    drafts for an encoder-decoder; it reads the source with an encoder of its own.
    """

    forward: ModelRuntime

    kind: ClassVar[str] = "assisted"

    def begin(self, context: Context, do_sample: bool, confidence: float) -> Drafting:
        if self.forward.is_encoder_decoder != context.model.is_encoder_decoder:
            ours, theirs = (_shape(one) for one in (context.model, self.forward))
            raise ModelError(f"{ours} needs an assistant of its own kind, and the assistant is {theirs}")
        source = context.prefix.source
        if source is not None:
            source = self.forward.encode(source.ids[0].tolist())
        follower = Follower(self.forward, use_cache=context.prefix.cache is not None, source=source)
        return WritingAhead(follower, context, do_sample, confidence)


class WritingAhead:
    """Drafts by a model that follows the row."""

    def __init__(self, follower: Follower, context: Context, do_sample: bool, confidence: float) -> None:
        self.follower = follower
        self.context = context
        self.do_sample = do_sample
        self.confidence = confidence
        self.seen = len(follower.ids)  # of the row, at the last call
        self.drafted: list[int] = []  # then

    def __call__(self, row: Tensor, count: int) -> Draft:
        follower, eos = self.follower, self.context.eos
        agreed = shared(row[self.seen :].tolist(), self.drafted)
        follower.rewind(min(self.seen + agreed, len(follower.ids), len(row) - 1))
        logits = follower.read(row[len(follower.ids) :].tolist())
        tokens: list[int] = []
        distributions: list[Tensor] = []
        while True:
            distribution = self._distribution(row, tokens, logits)
            if self.do_sample:
                token = int(torch.multinomial(distribution, 1, generator=self.context.rng))
                distributions.append(distribution)
            else:
                token = int(distribution.argmax())
            tokens.append(token)
            # the unsure token stays: to leave it out because of what was drawn would bend the distribution
            if len(tokens) == count or token in eos or float(distribution[token]) < self.confidence:
                break
            logits = follower.read([token])
        self.seen, self.drafted = len(row), tokens
        return Draft(tokens, torch.stack(distributions) if distributions else None)

    def _distribution(self, row: Tensor, tokens: list[int], logits: Tensor) -> Tensor:
        """f32 [V] over the target's vocabulary: tokens that the assistant lacks have no probability."""
        size = self.context.prefix.logits.shape[-1]
        logits = logits[:size].to(row.device)
        if len(logits) < size:
            logits = torch.nn.functional.pad(logits, (0, size - len(logits)), value=-torch.inf)
        scores = logits[None]
        if self.context.processors:
            history = torch.cat([row, row.new_tensor(tokens)])[None]
            for process in self.context.processors:
                scores = process(history, scores)
        return scores[0].softmax(-1)


@dataclass(frozen=True)
class PromptLookup:
    """What followed the newest n-gram where it stood before (github.com/apoorvumang/prompt-lookup-decoding).

    The longest n-gram counts, up to `max_matching_ngram_size`; of several places the first. An encoder-decoder's source
    is looked through before what it has written. No EOS is drafted, and no processor is asked.
    """

    max_matching_ngram_size: int = 2

    kind: ClassVar[str] = "prompt-lookup"

    def begin(self, context: Context, do_sample: bool, confidence: float) -> Drafting:
        source = context.prefix.source
        return LookingUp(self.max_matching_ngram_size, [] if source is None else source.ids[0].tolist(), context.eos)


class LookingUp:
    """An index of the first place of every n-gram, which grows with the row."""

    def __init__(self, longest: int, before: Iterable[int], eos: Sequence[int]) -> None:
        self.eos = frozenset(eos)
        self.text = list(before)
        self.taken = 0  # of the row
        self.indexed = 0  # n-grams that end before this place are known
        self.first: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]  # n-gram of size i+1 -> its end

    def __call__(self, row: Tensor, count: int) -> Draft:
        self.text += row[self.taken :].tolist()
        self.taken = len(row)
        text, length = self.text, len(self.text)
        for end in range(self.indexed + 1, length):  # something follows all of these
            for size, known in enumerate(self.first[:end], 1):
                known.setdefault(tuple(text[end - size : end]), end)
        self.indexed = max(self.indexed, length - 1)
        for size in range(min(len(self.first), length - 1), 0, -1):
            place = self.first[size - 1].get(tuple(text[length - size :]))
            if place is not None:
                found = text[place : place + count]
                stop = next((i for i, token in enumerate(found) if token in self.eos), len(found))
                return Draft(found[:stop])
        return Draft([])


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    for place, (mine, yours) in enumerate(zip(one, other, strict=False)):
        if mine != yours:
            return place
    return min(len(one), len(other))


def _shape(forward: ModelRuntime) -> str:
    return "an encoder-decoder" if forward.is_encoder_decoder else "a decoder-only model"

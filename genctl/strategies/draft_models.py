"""Drafters, and those that are models: a smaller one with the same tokens, or the model's first layers.

A drafter is shared by lanes; `begin` returns a `DraftWriter` for one lane. `Assisted` verifies every proposal, so a bad
drafter only costs time.

Universal assisted decoding: drafts by a model with another tokenizer, translated through text.

The row is decoded and encoded again for the assistant, and the assistant's text for the model. Only the newest part is
translated each time and aligned with the end of the known part by the longest common run of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from genctl.decode.read_along import ReadAlong
from genctl.decode.runtime import ModelRuntime, Pass, depth_of
from genctl.decode.types import Context, Draft
from genctl.errors import ModelError
from genctl.events import shared_length

# (scores f32 [1, V] after the processors, new tokens before) -> the token that is drawn
Draw: TypeAlias = Callable[[Tensor, int], int]


class DraftWriter(Protocol):
    """Drafts for one lane."""

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        """At most `count` (at least 1) tokens that may follow `text`, which only grows between two calls."""
        ...


class Drafter(Protocol):
    """A way to draft; one by a model has it as `forward`. `begin` raises ModelError if it cannot draft for a lane.

    One that learns from the texts of a run has `keep(tokens)`. Drafts without a model come with `rates`.
    """

    @property
    def kind(self) -> str: ...

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        """The writer for one lane, which takes the most probable tokens without `draw`.

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

    kind: ClassVar[str] = "assisted"

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        if self.forward.is_encoder_decoder != context.model.is_encoder_decoder:
            kinds = "a decoder-only model", "an encoder-decoder"
            model, assistant = (kinds[one.is_encoder_decoder] for one in (context.model, self.forward))
            raise ModelError(f"{model} needs an assistant of the same kind, and the assistant is {assistant}")
        source = context.prefix.source
        if source is not None:
            source = self.forward.encode(source.ids[0].tolist())
        cached = context.prefix.cache is not None
        follower = ReadAlong(self.forward, use_cache=cached, cuts=True, source=source)
        if follower.cached:  # a cache that forgets nothing is refused before the first step
            follower([context.prefix.tokens[0].tolist()])
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
        distributions: list[Tensor] = []
        before = len(text) - self.context.prefix.tokens.shape[1]
        while True:
            scores = self._scores(text, tokens, logits)
            distribution = scores[0].softmax(-1)
            if self.draw is not None:
                token = self.draw(scores, before + len(tokens))
                distributions.append(distribution)
            else:
                token = int(distribution.argmax())
            tokens.append(token)
            # the unsure token stays: dropping it depending on its value would bias the distribution
            if len(tokens) == count or token in eos or float(distribution[token]) < self.confidence:
                break
            logits = follower([[*text, *tokens]])[0]
        self.length, self.drafted = len(text), tokens
        return Draft(tokens, torch.stack(distributions) if distributions else None)

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


@dataclass(frozen=True)
class EarlyExitDrafter:
    """The model's first layers, followed by its head, draft (LayerSkip, arXiv:2404.16710). Create it with `after`.

    It shares the model's weights, and starts with the first layers of the prompt's cache.
    """

    forward: ModelRuntime

    kind: ClassVar[str] = "early-exit"

    @classmethod
    def after(cls, forward: ModelRuntime, layer: int, *, use_cache: bool = True) -> EarlyExitDrafter:
        """Exit after `layer` of the model's layers. Raises ModelError if the architecture does not allow it.

        Tries one token, because some models need all layers: their inputs have a part for each layer (Gemma 3n), or
        their cache needs a layer with attention (LFM2).
        """
        if forward.is_encoder_decoder:
            raise ModelError(
                f"assistant_early_exit needs a decoder-only model, and {forward.name} is an encoder-decoder"
            )
        depth = depth_of(forward)
        if not 1 <= layer < depth:
            raise ModelError(
                f"assistant_early_exit = {layer}: {forward.name} has {depth} layers, "
                f"so it can leave after 1 to {depth - 1}"
            )
        part = forward.first_layers(layer)
        cache = forward.new_cache() if use_cache and forward.abilities.supports_cache else None
        if cache is None or cache.is_croppable:  # drafting needs a croppable cache
            cut = None if cache is None else cache.with_layers(cache.layers[:layer])
            try:
                part(Pass(torch.zeros(1, 1, dtype=torch.long, device=part.device), cut, first=True))
            except ValueError:
                pass  # no layer with attention: `choose` refuses caches with states for drafts
            except ModelError as error:
                problem = f"{forward.name} cannot run with its first layers alone"
                raise ModelError(f"assistant_early_exit = {layer}: {problem}") from error
        return cls(part)

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        prefix = context.prefix
        if prefix.cache is None:
            uncached = ReadAlong(self.forward, use_cache=False, cuts=True)
            return ModelDraftWriter(uncached, context, draw, confidence)
        part = prefix.cache.with_layers(prefix.cache.layers[: depth_of(self.forward)])
        follower = ReadAlong(self.forward, cuts=True, cache=part, read=prefix.tokens[0].tolist())
        return ModelDraftWriter(follower, context, draw, confidence)


OPEN = "\ufffd"  # the decoding of an incomplete character
SLACK = 4  # tokens beyond the expected overlap to search for a match


@dataclass(frozen=True)
class UniversalDrafter:
    """An assistant with another tokenizer drafts its most probable tokens.

    `target_lookbehind` tokens of the row and `assistant_lookbehind` of the assistant's are encoded again with what
    follows them, so that the parts can be aligned.
    """

    forward: ModelRuntime
    tokenizer: Any  # the assistant's
    target_tokenizer: Any  # the model's
    assistant_lookbehind: int = 10
    target_lookbehind: int = 10

    kind: ClassVar[str] = "assisted"

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        if self.forward.is_encoder_decoder or context.model.is_encoder_decoder:
            raise ModelError("an assistant with another tokenizer needs two decoder-only models")
        return _TranslatingDraftWriter(self, context, confidence)


class _TranslatingDraftWriter:
    """The row in the assistant's tokens, and its drafts in the model's."""

    def __init__(self, drafter: UniversalDrafter, context: Context, confidence: float) -> None:
        self.drafter = drafter
        self.context = context
        self.confidence = confidence
        self.follower = ReadAlong(drafter.forward, use_cache=context.prefix.cache is not None, cuts=True)
        self.ids: list[int] = []  # the row in the assistant's tokens, at the last call
        self.seen = 0  # of the row, at the last call
        self.eos = frozenset(drafter.forward.eos)

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        drafter, follower = self.drafter, self.follower
        ids, same = self._translate(text)
        if not ids:
            return Draft([])
        read = follower.rows[0] if follower.rows else ()
        same += shared_length(read[same:], ids[same:])
        follower.cut(min(same, len(ids) - 1))
        logits = follower([ids])[0]
        drafted: list[int] = []
        ended = False
        while not ended:
            token = int(logits.argmax())
            ended = token in self.eos
            if not ended:
                drafted.append(token)
            if len(drafted) == count or float(logits.softmax(-1)[token]) < self.confidence:
                break
            if not ended:
                logits = follower([[*ids, *drafted]])[0]
        self.ids, self.seen = ids, len(text)
        recent = ids[max(0, len(ids) - drafter.assistant_lookbehind) :]
        encoded = _encode(drafter.target_tokenizer, _text(drafter.tokenizer, recent + drafted))
        known = len(_encode(drafter.target_tokenizer, _text(drafter.tokenizer, recent)))
        before = text[max(0, len(text) - known - SLACK) :]
        meeting = _meet(before, encoded, known)
        # the row's tokens stay, even if the text after them would be tokenised differently
        tokens = [] if meeting is None else encoded[meeting[1] + len(before) - meeting[0] :]
        if ended and self.context.eos:
            tokens.append(self.context.eos[0])
        size = self.context.prefix.logits.shape[-1]
        usable = next((place for place, token in enumerate(tokens) if token >= size), len(tokens))
        return Draft(tokens[: min(count, usable)])

    def _translate(self, row: Sequence[int]) -> tuple[list[int], int]:
        """The row in the assistant's tokens, and how many of them are unchanged since the last call."""
        drafter = self.drafter
        start = max(0, self.seen - drafter.target_lookbehind)
        if start:
            fresh = self._encoded(row[start:])
            known = len(self._encoded(row[start : self.seen]))
            same = max(0, len(self.ids) - known - SLACK)
            meeting = _meet(self.ids[same:], fresh, known)
            if meeting is not None:
                return self.ids[: same + meeting[0]] + fresh[meeting[1] :], same
        return self._encoded(row, special=True), 0

    def _encoded(self, row: Sequence[int], *, special: bool = False) -> list[int]:
        text = _text(self.drafter.target_tokenizer, row)
        return _encode(self.drafter.tokenizer, text, special=special)


def _meet(before: Sequence[int], again: Sequence[int], known: int) -> tuple[int, int] | None:
    """Align `again`, whose first tokens (about `known`) repeat the end of `before`: the end of the match in each.

    A run that ends where `before` ends is preferred; else the longest common run. None if nothing matches.
    """
    again = again[:known]
    best = (0, 0)
    for end in range(len(again), 0, -1):
        run = shared_length(before[::-1], again[end - 1 :: -1])
        best = max(best, (run, end), key=lambda match: match[0])
    run, end = best
    if run > 1 or (run and end == len(again)):  # a single token may match by chance
        return len(before), end
    match = SequenceMatcher(None, before, again, autojunk=False).find_longest_match(0, len(before), 0, len(again))
    return (match.a + match.size, match.b + match.size) if match.size else None


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text.rstrip(OPEN)


def _encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

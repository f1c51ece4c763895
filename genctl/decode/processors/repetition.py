"""Penalties that transformers lacks: presence, frequency, DRY. All are stateless."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genctl.decode.processors import Processor, token_sequences
from genctl.decode.processors.context import ProcessorContext

Ids: TypeAlias = NDArray[np.int64]


def presence(m: ProcessorContext, penalty: float) -> Processor:
    return presence_penalty(penalty, m.prompt_len, m.generation.penalty_last_n)


def frequency(m: ProcessorContext, penalty: float) -> Processor:
    return frequency_penalty(penalty, m.prompt_len, m.generation.penalty_last_n)


def dry_of_knobs(m: ProcessorContext, multiplier: float) -> Processor:
    g, knob = m.generation, "dry_sequence_breakers"
    sequences = {ids for text in g.dry_sequence_breakers for ids in token_sequences.containing(m.tokenizer, text, knob)}
    breakers, phrases = as_ids(sequences)
    return windowed(dry(multiplier, g.dry_base, g.dry_allowed_length, breakers, phrases), g.penalty_last_n)


def windowed(processor: Processor, window: int | None) -> Processor:
    """The processor, which sees the last `window` tokens alone; None sees all."""
    if window is None:
        return processor
    return lambda history, scores: processor(history[:, -window:], scores)


def presence_penalty(penalty: float, prompt_len: int, window: int | None = None) -> Processor:
    """Subtract `penalty` from tokens that are among the new ones; the prompt does not count (OpenAI API, vLLM)."""

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        return scores - penalty * (_counts(history, scores, prompt_len, window) > 0)

    return processor


def frequency_penalty(penalty: float, prompt_len: int, window: int | None = None) -> Processor:
    """Subtract `penalty` for each time that a token is among the new ones (OpenAI API, vLLM)."""

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        return scores - penalty * _counts(history, scores, prompt_len, window)

    return processor


def _counts(history: Tensor, scores: Tensor, prompt_len: int, window: int | None) -> Tensor:
    """f32 [R, V]: how often each token is among the new ones, of them the last `window`."""
    length = history.shape[1]
    new = history[:, prompt_len if window is None else max(prompt_len, length - window) :].to(scores.device)
    counts = scores.new_zeros(scores.shape[0], scores.shape[1] + 1)
    # An embedding may have more rows than there are scores; such ids are counted past the end.
    counts.scatter_add_(1, new.clamp(max=scores.shape[1]), torch.ones_like(new, dtype=scores.dtype))
    return counts[:, :-1]


def dry(
    multiplier: float,
    base: float,
    allowed_length: int,
    breakers: Collection[int],
    phrases: Sequence[tuple[int, ...]] = (),
) -> Processor:
    """DRY: make tokens that would continue a repetition less likely, the more so the longer it is.

    github.com/oobabooga/text-generation-webui/pull/5677. If the last n tokens occur earlier in the history (prompt
    included), the token that followed them there loses multiplier * base ** (n - allowed_length), from n =
    allowed_length on; the longest n counts. Nothing matches across a breaker, and a breaker itself is never penalised:
    `breakers` are ids, `phrases` are sequences of ids whose last one breaks.
    """
    stops = frozenset(breakers)
    # Close to the largest float32, where the token has no probability: longer repetitions do not count more.
    most = 1e30
    growing = base > 1.0 and multiplier < most
    longest = allowed_length + (math.ceil(math.log(most / multiplier) / math.log(base)) if growing else 0)

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        output = None
        for row, written in enumerate(history.cpu().numpy()):
            unbroken = _unbroken(written[-longest - _reach(phrases) :].tolist(), stops, phrases, longest)
            tokens, lengths = _continuations(written, unbroken, allowed_length)
            places = [place for place, token in enumerate(tokens) if token < scores.shape[1] and token not in stops]
            if not places:
                continue
            with np.errstate(over="ignore"):
                penalties = np.minimum(multiplier * np.power(base, lengths[places] - float(allowed_length)), most)
            output = scores.clone() if output is None else output
            output[row, torch.from_numpy(tokens[places]).to(scores.device)] -= scores.new_tensor(penalties)
        return scores if output is None else output

    return processor


def _reach(phrases: Sequence[tuple[int, ...]]) -> int:
    return max(map(len, phrases), default=0)


def _continuations(written: Ids, most: int, least: int) -> tuple[Ids, Ids]:
    """The tokens that would continue a repetition of `least` to `most` tokens, and how long the longest of each is.

    written int64 [T]. The first comparison finds all earlier places of the last token; each further one only checks
    the places that still match.
    """
    ends = np.flatnonzero(written[:-1] == written[-1]) if least <= most else np.empty(0, np.intp)
    lengths = np.ones_like(ends)
    live = np.arange(len(ends))
    for length in range(1, most):
        live = live[ends[live] >= length]
        live = live[written[ends[live] - length] == written[-1 - length]]
        if not len(live):
            break
        lengths[live] = length + 1
    long = lengths >= least
    followers, lengths = written[ends[long] + 1], lengths[long]
    if not len(followers):
        return followers, lengths
    order = np.lexsort((lengths, followers))
    followers, lengths = followers[order], lengths[order]
    last = np.append(followers[1:] != followers[:-1], True)
    return followers[last], lengths[last]


def _unbroken(newest: list[int], stops: frozenset[int], phrases: Sequence[tuple[int, ...]], most: int) -> int:
    """How many tokens at the end of the history come after its last breaker; at most `most`."""
    for back in range(min(most, len(newest))):
        end = len(newest) - back
        if newest[end - 1] in stops:
            return back
        for phrase in phrases:
            if newest[end - 1] == phrase[-1] and tuple(newest[max(0, end - len(phrase)) : end]) == phrase:
                return back
    return min(most, len(newest))


def as_ids(sequences: Collection[tuple[int, ...]]) -> tuple[frozenset[int], tuple[tuple[int, ...], ...]]:
    """Split sequences of ids into single ids and longer ones."""
    single = frozenset(sequence[0] for sequence in sequences if len(sequence) == 1)
    return single, tuple(sorted(sequence for sequence in sequences if len(sequence) > 1))

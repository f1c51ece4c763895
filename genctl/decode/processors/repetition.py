"""Penalties that transformers lacks: presence, frequency, DRY. Each function keeps nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from genctl.decode.types import Processor


def presence_penalty(penalty: float, prompt_len: int) -> Processor:
    """Subtract `penalty` from tokens that are among the new ones; the prompt does not count (OpenAI API, vLLM)."""

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        return scores - penalty * (_counts(history, scores, prompt_len) > 0)

    return processor


def frequency_penalty(penalty: float, prompt_len: int) -> Processor:
    """Subtract `penalty` for each time that a token is among the new ones (OpenAI API, vLLM)."""

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        return scores - penalty * _counts(history, scores, prompt_len)

    return processor


def _counts(history: Tensor, scores: Tensor, prompt_len: int) -> Tensor:
    """f32 [R, V]: how often each token is among the new ones."""
    new = history[:, prompt_len:].to(scores.device)
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

    github.com/oobabooga/text-generation-webui/pull/5677. Where the last n tokens stand earlier in the history (prompt
    included), the token that followed them there loses multiplier * base ** (n - allowed_length), from n =
    allowed_length on; the longest n counts. Nothing matches across a breaker, and a breaker itself is never penalised:
    `breakers` are ids, `phrases` are sequences of ids whose last one breaks.
    """
    stops = frozenset(breakers)
    # Beyond this a float32 has no room left, and the token has no probability.
    most = 1e30

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        rows, tokens, penalties = [], [], []
        for row, written in enumerate(history.tolist()):
            for token, length in _continuations(written, stops, phrases).items():
                if length >= allowed_length and token < scores.shape[1]:
                    rows.append(row)
                    tokens.append(token)
                    penalties.append(_penalty(multiplier, base, length - allowed_length, most))
        if not rows:
            return scores
        at = torch.tensor([rows, tokens], device=scores.device)
        made = scores.clone()
        made[at[0], at[1]] -= scores.new_tensor(penalties)
        return made

    return processor


def _penalty(multiplier: float, base: float, over: int, most: float) -> float:
    try:
        return min(multiplier * base**over, most)
    except OverflowError:
        return most


def _continuations(written: list[int], stops: frozenset[int], phrases: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Each token that would continue a repetition, with the length of the longest one it would continue."""
    if written[-1] not in written[:-1]:
        return {}
    unbroken = _unbroken(written, stops, phrases)
    if unbroken == 0:
        return {}
    longest: dict[int, int] = {}
    back = written[::-1]
    matches = _common_prefixes(back)
    for distance in range(1, len(back)):
        length = min(matches[distance], unbroken)
        follower = back[distance - 1]
        if length and follower not in stops and length > longest.get(follower, 0):
            longest[follower] = length
    return longest


def _unbroken(written: list[int], stops: frozenset[int], phrases: Sequence[tuple[int, ...]]) -> int:
    """How many tokens at the end of the history come after its last breaker."""
    for back in range(len(written)):
        end = len(written) - back
        if written[end - 1] in stops:
            return back
        if any(len(phrase) <= end and tuple(written[end - len(phrase) : end]) == phrase for phrase in phrases):
            return back
    return len(written)


def _common_prefixes(values: list[int]) -> list[int]:
    """The Z function: how many values from each position on equal those at the beginning. Linear in their number."""
    size = len(values)
    lengths = [0] * size
    left = right = 0
    for at in range(1, size):
        length = min(right - at, lengths[at - left]) if at < right else 0
        while at + length < size and values[length] == values[at + length]:
            length += 1
        lengths[at] = length
        if at + length > right:
            left, right = at, at + length
    return lengths


def as_ids(sequences: Collection[tuple[int, ...]]) -> tuple[frozenset[int], tuple[tuple[int, ...], ...]]:
    """Sequences of ids as single ids and as those longer than one."""
    single = frozenset(sequence[0] for sequence in sequences if len(sequence) == 1)
    return single, tuple(sorted(sequence for sequence in sequences if len(sequence) > 1))

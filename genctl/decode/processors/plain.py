"""The most common processors in plain torch, with the same numbers as transformers' classes.

Each is (history int64 [R, T], scores f32 [R, V]) -> scores f32 [R, V]. The rarer ones are transformers' own, imported
on use (see `standard`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from genctl.decode.processors import Processor

OUT = -float("inf")


def temperature(value: float) -> Processor:
    """Scores divided by `value`: below 1 sharpens, above 1 flattens."""
    return lambda history, scores: scores / value


def repetition_penalty(penalty: float) -> Processor:
    """Scores of tokens already in the row: divided if above 0, else multiplied (arXiv:1909.05858)."""

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        size = scores.shape[-1]
        ids = history.clamp(max=size)  # ids beyond the scores (an embedding may have more rows) share a spare column
        padded = torch.nn.functional.pad(scores, (0, 1))
        penalised = padded.gather(1, ids)
        penalised = torch.where(penalised < 0, penalised * penalty, penalised / penalty)
        return padded.scatter(1, ids, penalised)[..., :size]

    return processor


def encoder_repetition_penalty(penalty: float, source: Tensor) -> Processor:
    """Scores of the source's tokens (int64 [1, T]): multiplied if above 0, else divided, for each row."""

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        ids = source.expand(len(scores), -1)
        raised = scores.gather(1, ids)
        return scores.scatter(1, ids, torch.where(raised < 0, raised * penalty, raised / penalty))

    return processor


def sequence_bias(biases: Mapping[tuple[int, ...], float], vocab_size: int, device: torch.device | str) -> Processor:
    """Add a bias to the last token of each sequence, where the row ends with the tokens before it.

    Sequences whose prefixes are equally long are compared at once.
    """
    grouped: dict[int, list[tuple[int, ...]]] = {}
    for sequence in biases:
        grouped.setdefault(len(sequence) - 1, []).append(sequence)
    always = torch.zeros(vocab_size, device=device)
    for sequence in grouped.pop(0, []):
        always[sequence[0]] = biases[sequence]
    groups = [
        (
            torch.tensor([sequence[:-1] for sequence in sequences], device=device),  # [n, length]
            torch.tensor([sequence[-1] for sequence in sequences], device=device),
            torch.tensor([biases[sequence] for sequence in sequences], device=device),
        )
        for sequences in grouped.values()
    ]

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        bias = torch.zeros_like(scores) + always
        for prefixes, last, values in groups:
            length = prefixes.shape[1]
            if length <= history.shape[1]:
                same = (history[:, None, -length:] == prefixes).all(-1)  # [R, n]
                bias.index_add_(1, last, torch.where(same, values, 0.0).to(bias.dtype))
        return scores + bias

    return processor


def exponential_decay(start: int, factor: float, eos: Sequence[int], device: torch.device | str) -> Processor:
    """After `start` tokens of history the scores of EOS grow with each token by |score| (factor^n - 1).

    A score that is not finite stays: a minimum length above it has removed EOS.
    """
    ends = torch.tensor(list(eos), device=device)

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        behind = history.shape[-1] - start
        if behind <= 0:
            return scores
        ending = scores[:, ends]
        growth = ending.abs() * (factor**behind - 1)
        growth = growth.masked_fill(~ending.isfinite(), 0.0)
        added = torch.zeros_like(scores)
        added[:, ends] = growth
        return scores + added

    return processor


def top_k(k: int) -> Processor:
    """Keep the k best scores, and those equal to the last of them."""

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        least = scores.topk(min(k, scores.shape[-1]))[0][..., -1, None]
        return scores.masked_fill(scores < least, OUT)

    return processor


def nucleus(p: float, keep: int) -> Processor:
    """Keep the smallest set with probability p, and at least `keep` tokens (arXiv:1904.09751)."""

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        ordered, places = scores.sort(descending=False)
        out = ordered.softmax(-1).cumsum(-1) <= (1 - p)
        out[..., -keep:] = False
        return scores.masked_fill(out.scatter(1, places, out), OUT)

    return processor


def min_p(p: float, keep: int) -> Processor:
    """Remove tokens below p times the best one's probability; at least `keep` stay (arXiv:2407.01082)."""

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        probabilities = scores.softmax(-1)
        out = probabilities < p * probabilities.amax(-1, keepdim=True)
        best = probabilities.topk(min(keep, probabilities.shape[-1]), -1).indices
        return scores.masked_fill(out.scatter(-1, best, False), OUT)

    return processor


def no_repeat_ngram(size: int) -> Processor:
    """Remove tokens that would complete an n-gram that the row has already."""

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        length = history.shape[-1]
        if length < size:
            return scores
        begun = history[:, length + 1 - size :]
        windows = history.unfold(1, size, 1)  # [R, T - n + 1, n]
        same = (windows[..., :-1] == begun[:, None]).all(-1)
        vocabulary = scores.shape[-1]
        out = scores.new_zeros((len(scores), vocabulary + 1), dtype=torch.bool)
        # windows that do not match write to a spare column
        out.scatter_(1, torch.where(same, windows[..., -1].clamp(max=vocabulary), vocabulary), True)
        return scores.masked_fill(out[:, :vocabulary], OUT)

    return processor


def without(ids: Sequence[int], device: torch.device | str) -> Processor:
    """Remove these tokens."""
    barred = torch.tensor(list(ids), device=device)

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        out = torch.isin(torch.arange(scores.shape[-1], device=scores.device), barred)
        return torch.where(out, OUT, scores)

    return processor

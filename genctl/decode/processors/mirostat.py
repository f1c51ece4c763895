"""Samplers that adapt to the tokens written so far: mirostat 2 to their surprise, adaptive-p to their probability.

Mirostat: arXiv:2007.14966, version 2 as in llama.cpp. Adaptive-p: `llama_sampler_init_adaptive_p` of llama.cpp.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genctl.decode.processors import ByHistory
from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.filters import there
from genctl.decode.processors.rows import Places, RowCandidates, largest

Past: TypeAlias = tuple[float, Places, NDArray[Any]]  # mu, the remaining ids and their surprises


class Mirostat:
    """Keep the tokens whose surprise, in bits, is at most mu; mu adapts to the tokens of the row.

    mu begins at 2 * tau. After token x, drawn from the rest, renormalised to q: mu -= eta * (-log2 q(x) - tau).

    The threshold of a row is looked up by its tokens before the last one, so it depends only on the row's history:
    rows can be moved, forked and rolled back between calls. A row with an unknown history starts again at 2 * tau. If
    x was not among the remaining tokens, its surprise counts as mu.
    """

    def __init__(self, m: ProcessorContext, tau: float) -> None:
        self.tau, self.eta = tau, m.generation.mirostat_eta
        self.prompt_len, self.least = m.prompt_len, m.min_tokens_to_keep
        self._past: ByHistory[Past] = ByHistory()

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """history int64 [R, T], scores f32 [R, V] -> scores without the tokens above the threshold."""
        values, written = scores.detach().float().cpu().numpy(), history.cpu().numpy()
        output = np.full_like(values, -np.inf)
        for number, line in enumerate(written):
            row = RowCandidates.of(values[number])
            if row is None:  # no token, or NaN: the next check of the scores raises the error
                output[number] = values[number]
                continue
            mu = self._threshold(line[:-1].tobytes(), int(line[-1]), len(line))
            places = np.flatnonzero(row.weights >= row.total * 2.0 ** min(-mu, 1.0))
            if len(places) < self.least:
                places = largest(row.values, self.least)
            remaining = row.take(places)
            surprise = -np.log2(np.maximum(row.weights[places] / row.weights[places].sum(), 1e-300))
            ids = np.arange(remaining.size) if remaining.ids is None else remaining.ids
            self._past.put(line.tobytes(), (mu, ids, surprise), len(written))
            remaining.write(output[number])
        return torch.from_numpy(output).to(scores)

    def _threshold(self, before: bytes, token: int, length: int) -> float:
        past = self._past.get(before) if length > self.prompt_len else None
        if past is None:
            return 2.0 * self.tau
        mu, ids, surprises = past
        here = np.searchsorted(ids, token)
        observed = float(surprises[here]) if here < len(ids) and ids[here] == token else mu
        return mu - self.eta * (observed - self.tau)


_WIDTH, _PEAK, _SHARPNESS = 0.3, 5.0, 10.0  # of the curve, as in llama.cpp


class AdaptiveP:
    """Favour tokens with a probability near a goal: 2 * target - the mean probability of the new tokens so far.

    A token with probability p gets the score 5 - 10 * d ** 2 / (1 + d), d = |p - goal| / 0.3. The mean weights each
    token by `decay` times the weight of the one after it, and begins at the target. A removed token does not count, and
    a probability that rounds to 0 counts as 0. As in `Mirostat`, a row's mean is looked up by its tokens.
    """

    def __init__(self, m: ProcessorContext, target: float) -> None:
        self.target, self.decay, self.prompt_len = target, m.generation.adaptive_decay, m.prompt_len
        self._means: ByHistory[tuple[float, float]] = ByHistory()  # the weighted sum, and the weights
        self._probabilities: ByHistory[Tensor] = ByHistory(depth=2)  # f32 [V], before the change; NaN: removed

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """history int64 [R, T], scores f32 [R, V] -> scores f32 [R, V]; removed tokens stay removed."""
        probabilities, goals, kept = scores.softmax(-1), [], there(scores)
        known = torch.where(kept, probabilities, torch.nan)
        for row, line in enumerate(history.cpu().numpy()):
            total, weight = self._mean(line[:-1].tobytes(), int(line[-1]), len(line))
            self._means.put(line.tobytes(), (total, weight), len(history))
            self._probabilities.put(line.tobytes(), known[row], len(history))
            goals.append(min(max(2.0 * self.target - total / weight, 0.0), 1.0))
        away = (probabilities - probabilities.new_tensor(goals)[:, None]).abs() / _WIDTH
        return torch.where(kept, _PEAK - _SHARPNESS * away.square() / (1.0 + away), scores)

    def _mean(self, before: bytes, token: int, length: int) -> tuple[float, float]:
        """The weighted sum of the probabilities of the new tokens, and the sum of the weights."""
        first = self.target / (1.0 - self.decay), 1.0 / (1.0 - self.decay)
        past = self._means.get(before) if length > self.prompt_len else None
        probabilities = self._probabilities.get(before)
        if past is None or probabilities is None:
            return first
        probability = float(probabilities[token])
        if math.isnan(probability):
            return past
        return probability + self.decay * past[0], 1.0 + self.decay * past[1]

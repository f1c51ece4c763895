"""The input of filters on a CPU: one row's remaining scores, with fast access to the best ones.

A vocabulary of 50,000 takes torch 5 ms to sort. The best few hundred tokens decide what a filter keeps; one
comparison with a safe bound finds them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats: TypeAlias = NDArray[np.float32]
Places: TypeAlias = NDArray[np.intp]

SMALL = 2048
_COLUMNS = 1024


class RowCandidates:
    """The remaining tokens of one row: K of the V in the vocabulary."""

    def __init__(self, values: Floats, ids: Places | None, size: int) -> None:
        self.values = values  # f32 [K], all finite
        self.ids = ids  # [K], ascending; None if all V remain
        self.size = size  # V

    @classmethod
    def of(cls, scores: Floats) -> RowCandidates | None:
        """From scores f32 [V]; None if a score is NaN or +inf, or all are -inf."""
        best = float(scores.max())  # NaN if any is
        if not -np.inf < best < np.inf:
            return None
        ids = None if float(scores.min()) > -np.inf else np.flatnonzero(scores > -np.inf)
        row = cls(scores if ids is None else scores[ids], ids, len(scores))
        row.best = best
        return row

    def __len__(self) -> int:
        return len(self.values)

    @property
    def small(self) -> bool:
        """Whether the overhead of calls exceeds the cost of processing the tokens."""
        return len(self.values) <= SMALL

    def take(self, places: Places) -> RowCandidates:
        """The tokens at `places`, ascending."""
        if len(places) == len(self.values):
            return self
        return RowCandidates(self.values[places], places if self.ids is None else self.ids[places], self.size)

    def write(self, into: Floats) -> None:
        """Write the scores to their ids in `into`, f32 [V] of -inf."""
        if self.ids is None:
            into[:] = self.values
        else:
            into[self.ids] = self.values

    def dense(self) -> Tensor:
        """f32 [1, V], -inf where a token is missing."""
        if self.ids is None:
            return torch.from_numpy(self.values)[None]
        row = np.full((1, self.size), -np.inf, np.float32)
        self.write(row[0])
        return torch.from_numpy(row)

    @cached_property
    def best(self) -> float:
        """The largest score."""
        return float(self.values.max())

    @cached_property
    def weights(self) -> NDArray[Any]:
        """Weights proportional to the probabilities: f64 [K] for small rows; for others torch's softmax, f32 [K]."""
        if self.small:
            return np.exp(self.values.astype(np.float64) - self.best)
        probabilities: Floats = self.dense().softmax(-1)[0].numpy()
        return probabilities if self.ids is None else probabilities[self.ids]

    @cached_property
    def total(self) -> float:
        """The sum of the weights."""
        return float(self.weights.sum(dtype=np.float64))


def best_places(keys: Floats, count: int) -> Places:
    """Places, ascending, of the `count` largest of keys f32 [K] (1 <= count <= K), and of a few others.

    For a long row the bound is the `count`-th largest of the maxima of interleaved parts.
    """
    parts, columns = keys, max(_COLUMNS, 2 * count)
    if len(keys) >= 4 * columns:
        rows = len(keys) // columns
        parts = keys[: rows * columns].reshape(rows, columns).max(0)
    place = len(parts) - count
    return np.flatnonzero(keys >= np.partition(parts, place)[place])


def largest(keys: Floats, count: int) -> Places:
    """Places, ascending, of the `count` largest of keys f32 [K] and of those equal to the smallest of them."""
    if count >= len(keys):
        return np.arange(len(keys))
    places = best_places(keys, count)
    best = keys[places]
    place = len(best) - count
    reach: Places = places[best >= np.partition(best, place)[place]]
    return reach


def front(keys: Floats, weights: NDArray[Any], needed: float) -> Places | None:
    """Places of the largest of keys f32 [K], enough for their weights to sum to `needed`.

    None if that takes so many that sorting all of them is as fast.
    """
    most = float(weights.max())
    for count in (_COLUMNS // 4, 4 * _COLUMNS):
        if 4 * count < len(keys) and count * most >= needed:
            places = best_places(keys, count)
            if weights[places].sum(dtype=np.float64) >= needed:
                return places
    return None

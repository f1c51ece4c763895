"""The figures of positions, from the logits of both sides.

They are computed in float64 from the float32 logits, so that their own rounding (1e-16) is far below that of any model.
M positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from genctl.parity.values import Position

AT_ONCE = 2**20  # logits of one side that are compared at a time: 8 MiB in float64


def figures(places: Sequence[tuple[str, int, int]], reference: Tensor, other: Tensor) -> list[Position]:
    """The figures of M positions. `places`: text, index and token of each; reference and other f32 [M, V]."""
    a, b = reference.double(), other.double()
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    kl = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1).clamp(min=0.0)
    first_a, first_b = first_choice(reference), first_choice(other)
    both = torch.stack([first_a, first_b], 1)
    own, theirs = p.gather(1, both), q.gather(1, both)  # [M, 2]
    ranks = [1 + (p > own[:, 1:]).sum(-1), 1 + (q > theirs[:, :1]).sum(-1)]
    tokens = torch.tensor([token for _, _, token in places])[:, None]
    best = p.topk(min(2, p.shape[-1]), -1).values
    columns = [
        kl,
        first_a == first_b,
        (own[:, 0] - own[:, 1]).clamp(min=0.0),
        first_a,
        first_b,
        *ranks,
        p.gather(1, tokens)[:, 0],
        q.gather(1, tokens)[:, 0],
        shift(b - a),
        best[:, 0] - best[:, -1],
    ]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [Position(*place, *row) for place, row in zip(places, rows, strict=True)]


def first_choice(logits: Tensor) -> Tensor:
    """The most probable token, the first of equals: f32 [M, V] -> int64 [M]."""
    return torch.from_numpy(logits.numpy().argmax(-1))


def shift(difference: Tensor) -> Tensor:
    """Root mean square of differences of logits [M, V] without their mean, which no probability shows -> f64 [M]."""
    few = max(AT_ONCE // difference.shape[-1], 1)
    if len(difference) > few:
        return torch.cat([shift(rows) for rows in torch.split(difference, few)])
    finite = difference.isfinite()  # some models forbid tokens by -inf
    wide = torch.where(finite, difference.double(), 0.0)
    count = finite.sum(-1, keepdim=True).clamp(min=1)
    centred = torch.where(finite, wide - wide.sum(-1, keepdim=True) / count, 0.0)
    return (centred.square().sum(-1) / count[:, 0]).sqrt()


class Pairs:
    """Collects pairs of rows and hands out their figures, `AT_ONCE` logits at a time."""

    def __init__(self, receive: Callable[[Position], object]) -> None:
        self._receive = receive
        self._places: list[tuple[str, int, int]] = []
        self._rows: list[tuple[Tensor, Tensor]] = []

    def add(self, place: tuple[str, int, int], reference: Tensor, other: Tensor) -> None:
        """One position: text, index and token; f32 [V] of both sides, on the host."""
        self._places.append(place)
        self._rows.append((reference, other))
        if len(self._rows) * reference.shape[-1] >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Hand out what is left."""
        if self._rows:
            a, b = (torch.stack(rows) for rows in zip(*self._rows, strict=True))
            places, self._places, self._rows = self._places, [], []
            for position in figures(places, a, b):
                self._receive(position)

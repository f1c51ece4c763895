"""A strategy driven on scores other than the model's: what contrasts models or layers needs no search of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from torch import Tensor

from genctl.decode.types import Context, Scores, Search, Strategy

# Added to the log-probability of tokens that a contrast leaves out: beyond reach (their probability is 0 in float32),
# yet in the model's order, so that there is something to write where processors ban all the others.
OUT = -10000.0


def rescored(inner: Strategy, contrast: Callable[[Scores], Tensor], scores: Scores, context: Context) -> Search:
    """Have `inner` choose by `contrast(scores)`, f32 [N, V], after the lane's processors. For the space "raw"."""

    def other(scores: Scores) -> Scores:
        return replace(scores, logits=context.process(contrast(scores))[:, None])

    with closing(inner.search(other(scores), context)) as search:
        try:
            choice = next(search)
            while True:
                scores = yield choice
                choice = search.send(other(scores))
        except StopIteration:
            return

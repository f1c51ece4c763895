"""Run a strategy on changed scores, for contrasts of models or layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from torch import Tensor

from genctl.decode.types import Context, Scores, Search, Strategy

# Added to the log-probability of tokens that a contrast excludes: their probability is 0 in float32, but their order is
# the model's, so that a token remains if processors ban all the others.
OUT = -10000.0


def rescored(inner: Strategy, contrast: Callable[[Scores], Tensor], scores: Scores, context: Context) -> Search:
    """Let `inner` choose by `contrast(scores)`, f32 [N, V], after the lane's processors. For the space "raw"."""

    def contrasted(scores: Scores) -> Scores:
        return replace(scores, logits=context.process(contrast(scores))[:, None])

    with closing(inner.search(contrasted(scores), context)) as search:
        try:
            choice = next(search)
            while True:
                scores = yield choice
                choice = search.send(contrasted(scores))
        except StopIteration:
            return

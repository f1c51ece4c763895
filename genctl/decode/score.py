"""Score: what the model says after each row, and what the lane's processors make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from genctl.decode.processors import trace as tracing
from genctl.decode.processors.rows import RowCandidates
from genctl.decode.row_tokens import RowTokens
from genctl.decode.types import Processor, Space

Stages = list[list[tracing.Stage]]  # for each scored position, what each processor did


class ModelScores(NamedTuple):
    """What the model scores after F tokens of each of N rows."""

    logits: Tensor  # f32 [N, F, V]
    logprobs: Tensor  # f32 [N, F, V]
    layers: tuple[Tensor, ...] | None = None  # hidden states of each layer, [N, F, H]

    @classmethod
    def of(cls, logits: Tensor, layers: tuple[Tensor, ...] | None = None) -> ModelScores:
        """logits f32 [N, F, V]."""
        return cls(logits, logits.log_softmax(-1), layers)

    def map(self, change: Callable[[Tensor], Tensor]) -> ModelScores:
        """The same change of every tensor."""
        return ModelScores(change(self.logits), change(self.logprobs), self.layers and tuple(map(change, self.layers)))

    def cut(self, rows: slice, newest: int) -> ModelScores:
        """Those of some rows, after their newest tokens."""
        return self.map(lambda tensor: tensor[rows, -newest:])

    def followed_by(self, other: ModelScores) -> ModelScores:
        """Along F, as many rows of both."""
        layers = None
        if self.layers is not None and other.layers is not None:
            layers = tuple(torch.cat(pair, 1) for pair in zip(self.layers, other.layers, strict=True))
        logits = torch.cat([self.logits, other.logits], 1)
        return ModelScores(logits, torch.cat([self.logprobs, other.logprobs], 1), layers)


class ProcessedScores(NamedTuple):
    """Scores with what is known of them."""

    logits: Tensor  # f32 [N, D+1, V], after the processors
    stages: Stages  # where the lane is traced
    left: list[RowCandidates] | None = (
        None  # what filters left of each row, where they came last and nothing is drafted
    )
    best: Tensor | None = None  # f32 [D+1, N], the largest score of each row, to be judged by `trace.judge`


def score(
    processors: Sequence[Processor],
    text: RowTokens,
    draft: Tensor | None,
    logits: Tensor,
    logprobs: Tensor,
    space: Space,
    *,
    trace: bool = False,
) -> ProcessedScores:
    """Apply processors to what follows each row and each draft prefix.

    `text` is that of R rows; draft int64 [R, B, D] or None; logits and logprobs f32 [N, D+1, V].
    """
    scores = logprobs if space == "logprobs" else logits
    if space == "raw" or not processors:
        return ProcessedScores(scores, [])
    tokens = text.tensor()
    flat: Tensor | None = None
    if draft is not None:
        tokens = tokens.repeat_interleave(draft.shape[1], 0)
        flat = draft.flatten(0, 1)
    columns: list[Tensor] = []
    stages: Stages = []
    left = None
    for place in range(scores.shape[1]):
        history = tokens if place == 0 or flat is None else torch.cat([tokens, flat[:, :place]], 1)
        here = scores[:, place]
        if trace:
            here, stage = tracing.apply(processors, history, here, timing=True)
            stages.append(stage)
        else:
            here, left = tracing.sift(processors, history, here)
        columns.append(here)
    if len(columns) > 1:
        return ProcessedScores(
            torch.stack(columns, 1), stages, None, torch.stack([column.amax(-1) for column in columns])
        )
    return ProcessedScores(columns[0][:, None], stages, left, None if left is not None else columns[0].amax(-1)[None])

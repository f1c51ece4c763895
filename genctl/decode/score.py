"""Score: the model's scores after each row, and the scores after the lane's processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from genctl.decode.row_tokens import PaddedTokens, RowTokens
from genctl.decode.transfer import on_host
from genctl.decode.types import Space
from genctl.errors import ModelError
from genctl.kernels.ops import log_softmax

if TYPE_CHECKING:
    from genctl.decode.processors import Processor
    from genctl.decode.processors.rows import RowCandidates
    from genctl.decode.processors.trace import Stage


# -- logits that are not finite: one check and one error for everything that reads logits ------------------------------


def is_finite(logits: Tensor) -> bool:
    """Whether logits f32 [..., V] are a distribution in every row. Some tokens may be forbidden (-inf), not all."""
    return bool(torch.isfinite(logits.amax(-1)).all())  # the maximum is NaN if any logit of the row is


def check_finite(logits: Tensor, where: str) -> None:
    """Raises ModelError unless the logits are a distribution. The message says `where`."""
    if not is_finite(logits):
        raise damaged(where)


def damaged(where: str) -> ModelError:
    """The error for logits that are not finite."""
    return ModelError(f"the model's logits are not finite {where}: its weights or activations are damaged")


ROWS = 8  # at least so many rows in one log-softmax if only the chosen tokens' values are needed
Stages: TypeAlias = "list[list[Stage]]"  # the effect of each processor, for each scored position


class ModelScores:
    """The model's scores after F tokens of each of N rows."""

    def __init__(self, logits: Tensor, layers: tuple[Tensor, ...] | None = None) -> None:
        self.logits = logits  # f32 [N, F, V]
        self.layers = layers  # hidden states of each layer, [N, F, H]

    @cached_property
    def logprobs(self) -> Tensor:
        """f32 [N, F, V], computed on first use."""
        return log_softmax(self.logits)

    def logprobs_of(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities of `tokens` int64 [C, m] at the first m positions of `rows` int64 [C] -> f32 [C, m]."""
        count, places, vocabulary = self.logits.shape
        if "logprobs" not in vars(self) and on_host(tokens) and len(tokens) == count:
            if count == 1:
                return log_softmax(self.logits[0, : tokens.shape[1]]).gather(1, tokens.t()).t()
            if places == tokens.shape[1] == 1 and torch.equal(rows, counted(count, rows.device)):
                # a few rows at a time fit into the CPU's cache; the numbers are the same, and no [N, V] is stored
                few = max(ROWS, torch.get_num_threads())
                parts = zip(torch.split(self.logits[:, 0], few), torch.split(tokens, few), strict=True)
                return torch.cat([log_softmax(logits).gather(1, chosen) for logits, chosen in parts])
        at = rows[:, None] * places + counted(tokens.shape[1], tokens.device)
        return self.logprobs.take(at * vocabulary + tokens)

    def map(self, change: Callable[[Tensor], Tensor]) -> ModelScores:
        """The scores with `change` applied to every tensor."""
        return ModelScores(change(self.logits), self.layers and tuple(map(change, self.layers)))

    def cut(self, rows: slice, newest: int) -> ModelScores:
        """The scores of some rows after each of their last `newest` tokens."""
        return self.map(lambda tensor: tensor[rows, -newest:])

    def followed_by(self, other: ModelScores) -> ModelScores:
        """The scores of both, concatenated along F; the rows are the same."""
        layers = None
        if self.layers is not None and other.layers is not None:
            layers = tuple(torch.cat(pair, 1) for pair in zip(self.layers, other.layers, strict=True))
        return ModelScores(torch.cat([self.logits, other.logits], 1), layers)


@lru_cache(maxsize=64)
def counted(count: int, device: torch.device) -> Tensor:
    """0, 1, … as int64 [count]. It is shared: do not write to it."""
    return torch.arange(count, device=device)


class ProcessedScores(NamedTuple):
    """Scores after the processors."""

    logits: Tensor  # f32 [N, D+1, V], after the processors
    stages: Stages  # empty if the lane is not traced
    left: list[RowCandidates] | None = None  # tokens left in each row, if filters came last and nothing is drafted
    best: Tensor | None = None  # f32 [D+1, N], the largest score of each row, for `build.check_choosable`


def score(
    processors: Sequence[Processor],
    text: RowTokens | PaddedTokens,
    draft: Tensor | None,
    model: ModelScores,
    space: Space,
    *,
    trace: bool = False,
) -> ProcessedScores:
    """Apply processors to the scores after each row and each draft prefix.

    `text`: the tokens of R rows; draft: int64 [R, B, D] or None; `model`: the scores of N rows at D+1 positions.
    """
    scores = model.logprobs if space == "logprobs" else model.logits
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
        here, stage, left = score_at(processors, history, scores[:, place], trace=trace)
        stages += stage
        columns.append(here)
    if len(columns) > 1:
        return ProcessedScores(
            torch.stack(columns, 1), stages, None, torch.stack([column.amax(-1) for column in columns])
        )
    return ProcessedScores(columns[0][:, None], stages, left, None if left is not None else columns[0].amax(-1)[None])


def score_at(
    processors: Sequence[Processor], history: Tensor, scores: Tensor, *, trace: bool
) -> tuple[Tensor, Stages, list[RowCandidates] | None]:
    """The scores f32 [N, V] of one position after the processors, their effects if traced, and what filters left."""
    from genctl.decode.processors import trace as tracing

    if trace:
        scores, stage = tracing.run_traced(processors, history, scores, timing=True)
        return scores, [stage], None
    scores, left = tracing.run(processors, history, scores)
    return scores, [], left

"""Run processors, trace the effect of each, and report which of them removed the last token.

A token counts as removed if its score is -inf, or the lowest float that some processors write instead. A probability of
0 is not enough: at a low temperature probabilities underflow. All figures are the same for logits and for
log-probabilities, because their softmax is the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from genctl.decode.processors import Processor
from genctl.decode.processors.build import check, name_of
from genctl.decode.processors.filters import Filter, cut, there
from genctl.decode.processors.rows import RowCandidates
from genctl.events import Trace
from genctl.kernels.ops import total


@dataclass(frozen=True, eq=False)
class Stage:
    """One processor's scores before and after it, f32 [R, V] each, and the seconds it took (0.0 if not timed)."""

    name: str
    before: Tensor
    after: Tensor
    seconds: float = 0.0


def run_checked(processors: Sequence[Processor], history: Tensor, scores: Tensor) -> Tensor:
    """history int64 [R, T], scores f32 [R, V] -> scores f32 [R, V] after all processors in order, checked.

    Consecutive filters share one pass over a row. `scores` is not changed. Raises UsageError if the processors leave a
    row without tokens, ModelError if the scores are not numbers.
    """
    scores, left = run(processors, history, scores)
    if processors and left is None:
        check(scores, processors)
    return scores


def run(processors: Sequence[Processor], history: Tensor, scores: Tensor) -> tuple[Tensor, list[RowCandidates] | None]:
    """Like `run_checked`, but unchecked; if filters come last, the remaining tokens of each row are returned too."""
    original, left = scores, None
    for filters, group in groupby(processors, lambda processor: isinstance(_function(processor), Filter)):
        if filters:
            scores, left = cut([_function(processor) for processor in group], history, scores)
            continue
        for processor in group:
            # some processors write in place
            scores, left = processor(history, scores.clone() if scores is original else scores), None
    return scores, left


def _function(processor: Processor) -> Any:
    return getattr(processor, "function", None)


def run_traced(
    processors: Sequence[Processor], history: Tensor, scores: Tensor, *, timing: bool = False, may_end: bool = False
) -> tuple[Tensor, list[Stage]]:
    """Like `run_checked`, with the scores after each processor. The figures are computed by `traces`.

    With `may_end`, for a single row: if it has no token left, all its scores become -inf, and no more stages follow.
    """
    stages = []
    for processor in processors:
        # A processor that writes in place would otherwise change the output of the stage before it.
        copied = scores.clone()
        started = _now(scores) if timing else 0.0
        output = processor(history, copied)
        seconds = _now(output) - started if timing else 0.0
        ended = may_end and not bool(there(output).any()) and not bool(output.isnan().any())
        output = torch.full_like(output, -torch.inf) if ended else output
        stages.append(Stage(name_of(processor), scores, output, seconds))
        scores = output
        if ended:
            return scores, stages
    if stages:
        check(scores, processors)
    return scores, stages


def traces(stages: Sequence[Stage], rows: Tensor, tokens: Tensor) -> list[tuple[Trace, ...]]:
    """The effect of each stage on each candidate: token `tokens[i]`, chosen from scored row `rows[i]`.

    rows and tokens int64 [C] -> C tuples with one `events.Trace` for each stage. The seconds of a stage are for the
    whole call, with all of its rows.
    """
    if not stages:
        return [() for _ in range(len(tokens))]
    columns: list[list[Trace]] = []
    before = stages[0].before[rows]
    share, alive = _probabilities(before), there(before)
    for stage in stages:
        after = stage.after[rows]
        new_share, new_alive = _probabilities(after), there(after)
        figures = zip(
            (alive & ~new_alive).sum(-1).tolist(),
            (0.5 * total((new_share - share).abs())).clamp(max=1.0).tolist(),
            (after.argmax(-1) != before.argmax(-1)).tolist(),
            share.gather(1, tokens[:, None])[:, 0].tolist(),
            new_share.gather(1, tokens[:, None])[:, 0].tolist(),
            strict=True,
        )
        columns.append([Trace(stage.name, *row, stage.seconds) for row in figures])
        before, share, alive = after, new_share, new_alive
    return list(zip(*columns, strict=True))


def _probabilities(scores: Tensor) -> Tensor:
    """f32 [C, V] probabilities; all zero if a row has no token left or its scores are not numbers."""
    return scores.softmax(-1).nan_to_num(0.0)


def _now(scores: Tensor) -> float:
    if scores.is_cuda:
        torch.cuda.synchronize(scores.device)
    return time.perf_counter()

"""Beam search: plain, sampled, and diverse.

`EarlyStoppingRule` has transformers' three meanings of `early_stopping`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from genctl import compat
from genctl.decode import transfer
from genctl.decode.processors.rows import largest
from genctl.decode.types import Choice, Context, FinishedRow, Pruning, Rows, Scores, Search, Traits
from genctl.strategies.sampling import draw_distinct


@dataclass(frozen=True)
class Beam:
    """Keep the `beams` best hypotheses at each step; sequences and scores are those of transformers.

    With `do_sample` the candidates are sampled without replacement from the softmax of the totals; which of them may
    end depends on the version of transformers (`compat.ends_by_draw`). With `num_beam_groups` above 1 this is diverse
    beam search (Vijayakumar et al. 2016, arXiv:1610.02424): each group is a search of its own, and a token costs
    `diversity_penalty` for every beam of an earlier group that chose it at the same step. Groups follow transformers 4,
    the last version with them: a group that has ended counts as choosing `pad_token_id` (or the first EOS id) at every
    further step.
    """

    beams: int
    do_sample: bool = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    n: int = 1
    pad_token_id: int | None = None

    @property
    def kind(self) -> str:
        if self.num_beam_groups > 1:
            return "diverse-beam"
        return "beam-sample" if self.do_sample else "beam"

    @property
    def traits(self) -> Traits:
        return Traits("raw" if self.num_beam_groups > 1 else "logprobs")  # the penalty comes before the processors

    @property
    def max_rows(self) -> int:
        return self.beams

    def search(self, scores: Scores, context: Context) -> Search:
        size, grouped = self.beams // self.num_beam_groups, self.num_beam_groups > 1
        # every row may have each EOS id among its best candidates, so take `size` more for each
        count = max(2, 1 + len(context.eos)) * size
        rule = EarlyStoppingRule(self.length_penalty, self.early_stopping, context.max_new_tokens)
        members = {group: [0] for group in range(self.num_beam_groups)}  # the live rows of each group
        totals = scores.logits.new_zeros(1)
        while True:
            parts: dict[int, _Continuations] = {}
            if grouped:
                chosen = _ChosenBefore(self, scores.logits, context)
                for group in range(self.num_beam_groups):
                    if group not in members:
                        chosen.add_padding(size)
                        continue
                    fined = scores.logprobs[:, 0].clone()
                    fined[members[group]] -= self.diversity_penalty * chosen.counts
                    logprobs = context.process(fined)
                    parts[group] = self._candidates(logprobs, totals, members[group], count, context)
                    chosen.add(parts[group], size)
            else:
                parts[0] = self._candidates(scores.logits[:, 0], totals, members[0], count, context)
            ranks = _joined([part.totals for part in parts.values()])
            groups = [group for group, part in parts.items() for _ in range(len(part.totals))]
            is_done = _BeamIsDone(rule, size, grouped, {group: groups.index(group) for group in parts})
            scores = yield Choice(
                _joined([part.rows for part in parts.values()]),
                _joined([part.tokens for part in parts.values()]),
                totals=ranks,
                pruning=Pruning(size, groups if grouped else None, parts[0].may_finish if self.do_sample else None),
                is_done=is_done,
            )
            totals = ranks[transfer.to_device(scores.survivors, ranks.device)]
            members = {}
            for row, survivor in enumerate(scores.survivors):
                if groups[survivor] not in is_done.groups:
                    members.setdefault(groups[survivor], []).append(row)

    def _candidates(
        self, logprobs: Tensor, totals: Tensor, rows: list[int], count: int, context: Context
    ) -> _Continuations:
        """The continuations of one group's rows, best first. logprobs f32 [R, V], totals f32 [R]."""
        vocabulary = logprobs.shape[1]
        some = transfer.to_device(rows, logprobs.device) if len(rows) < logprobs.shape[0] else None
        if some is not None:
            logprobs, totals = logprobs[some], totals[some]
        may_finish = None
        if self.do_sample:
            flat = (logprobs + totals[:, None]).flatten()
            drawn = draw_distinct(flat, count, self.beams * vocabulary, context.rng)
            values, order = flat[drawn].sort(descending=True, stable=True)
            places = drawn[order]
            if compat.ends_by_draw():
                may_finish = order < self.beams
        else:
            values, places = ranked(logprobs, totals, count)
        within = torch.div(places, vocabulary, rounding_mode="floor")
        tokens = places - within * vocabulary
        return _Continuations(within if some is None else some[within], tokens, values, may_finish)


@dataclass
class _Continuations:
    """Candidates of one group, best first; a total of -inf is impossible."""

    rows: Tensor  # int64 [C]
    tokens: Tensor  # int64 [C]
    totals: Tensor  # f32 [C]
    may_finish: Tensor | None  # bool [C], see `Pruning`


class _ChosenBefore:
    """How often earlier groups chose each token at this step."""

    def __init__(self, beam: Beam, scores: Tensor, context: Context) -> None:
        self.counts = scores.new_zeros(scores.shape[-1])  # f32 [V]
        self.eos = transfer.to_device(context.eos, scores.device)
        self.padding = next(iter(context.eos), None) if beam.pad_token_id is None else beam.pad_token_id

    def add_padding(self, size: int) -> None:
        """Count an ended group as choosing padding."""
        if self.padding is not None:
            self.counts[self.padding] += size

    def add(self, candidates: _Continuations, size: int) -> None:
        """Count the first `size` candidates that continue."""
        goes_on = (candidates.totals > -torch.inf) & ~torch.isin(candidates.tokens, self.eos)
        goes_on &= goes_on.cumsum(0) <= size
        self.counts.index_add_(0, candidates.tokens, goes_on.to(self.counts.dtype))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass
class _BeamIsDone:
    """Whether all groups of a choice are done. Afterwards `groups` holds those that are.

    transformers 5 compares with the best live row; groups, as in version 4, with the best candidate, ended or not.
    """

    rule: EarlyStoppingRule
    size: int
    grouped: bool
    first: dict[int, int]  # the place of each group's best candidate
    groups: frozenset[int] = frozenset()

    def __call__(self, ended: Sequence[FinishedRow], rows: Rows, totals: Sequence[float]) -> bool:
        if not self.grouped:
            return self.rule.reached(ended, self.size, rows.totals[0], rows.written)
        took_part = [group for group, place in self.first.items() if totals[place] > -math.inf]
        self.groups = frozenset(
            group
            for group in took_part
            if self.rule.reached(
                [row for row in ended if row.group == group], self.size, totals[self.first[group]], rows.written
            )
        )
        return len(self.groups) == len(took_part)


def ranked(logprobs: Tensor, totals: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest sums of logprobs f32 [R, V] and totals f32 [R], best first: f32 [C] and int64 [C].

    The second tensor holds places in the flattened sums. On a CPU only the best of each row are summed, unless sums are
    equal: then torch's order of all sums decides.
    """
    best = _ranked(logprobs, totals, count) if transfer.on_host(logprobs) else None
    if best is not None:
        return best
    flat = (logprobs + totals[:, None]).flatten()
    values, places = flat.topk(min(count, len(flat)))
    return values, places


def _ranked(logprobs: Tensor, totals: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    width = logprobs.shape[1]
    if count >= width:
        return None
    sums, places = [], []
    for number, (row, total) in enumerate(zip(logprobs.numpy(), totals.numpy(), strict=True)):
        best = largest(row, count + 1)  # one more, to detect equal sums at the boundary
        if len(best) > 2 * count + 2:
            return None
        sums.append(row[best] + total)
        places.append(best + number * width)
    joined = np.concatenate(sums)
    order = np.argsort(-joined)[: count + 1]
    values = joined[order]
    if not values[-1] > -np.inf or bool((values[1:] == values[:-1]).any()):
        return None
    return torch.from_numpy(values[:count]), torch.from_numpy(np.concatenate(places)[order[:count]])


EarlyStopping: TypeAlias = bool | Literal["never"]


@dataclass(frozen=True)
class EarlyStoppingRule:
    """Compares the results with the best score that a live row may still reach."""

    length_penalty: float
    early_stopping: EarlyStopping
    longest: int  # new tokens that a row may have

    def reached(self, results: Sequence[FinishedRow], capacity: int, best: float, written: int) -> bool:
        """Whether there are `capacity` results and a row with the total `best` is not expected to beat the worst.

        The rows have `written` new tokens. With `early_stopping` False the row is assumed to end now, as in
        transformers; "never" assumes the length with the best possible score.
        """
        if len(results) < capacity:
            return False
        if self.early_stopping is True:
            return True
        length = self.longest if self.early_stopping == "never" and self.length_penalty > 0 else written
        hope = float(best / length**self.length_penalty)
        return hope <= min(result.score(self.length_penalty) for result in results)

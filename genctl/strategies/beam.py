"""Beam search: plain, sampled, and in groups that keep away from each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from genctl.decode import host
from genctl.decode.host import Asked
from genctl.decode.processors.rows import largest
from genctl.decode.types import Choice, Closed, Context, Rows, Scores, Search, Space
from genctl.errors import ModelError
from genctl.strategies.drawing import draw_distinct
from genctl.strategies.ending import EarlyStopping, Ending


@dataclass(frozen=True)
class Beam:
    """Keep the `num_beams` best hypotheses at each step; sequences and scores are those of transformers.

    With `do_sample` the candidates are drawn without replacement from the softmax of the totals instead of being the
    best. With `num_beam_groups` above 1 this is diverse beam search (Vijayakumar et al. 2016, arXiv:1610.02424): each
    group is a search of its own, and a token costs `diversity_penalty` for every beam of an earlier group that chose it
    at the same step. Groups follow transformers 4, the last to have them: a group that has ended is taken to choose
    `pad_token_id` (the first EOS id, if there is none) at every further step.
    """

    num_beams: int
    do_sample: bool = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    n: int = 1
    pad_token_id: int | None = None

    needs_hidden: ClassVar[bool] = False
    drafts: ClassVar[bool] = False
    waits: ClassVar[bool] = False  # what must be known is fetched here

    @property
    def kind(self) -> str:
        if self.num_beam_groups > 1:
            return "diverse-beam"
        return "beam-sample" if self.do_sample else "beam"

    @property
    def space(self) -> Space:
        return "raw" if self.num_beam_groups > 1 else "logprobs"  # the penalty comes before the processors

    @property
    def rows(self) -> int:
        return self.num_beams

    def search(self, scores: Scores, context: Context) -> Search:
        size = self.num_beams // self.num_beam_groups
        # with several EOS ids all of a row's best candidates may end, and `size` others must be at hand
        count = max(2, 1 + len(context.eos)) * size
        ending = Ending(self.length_penalty, self.early_stopping, context.max_new_tokens)
        padding = list(context.eos[:1]) if self.pad_token_id is None else [self.pad_token_id]
        members = {group: [0] for group in range(self.num_beam_groups)}  # the live rows of each group
        totals = scores.logits.new_zeros(1)
        while True:
            parts = []
            chosen: list[int] = []  # by the groups before, at this step
            own = scores.logprobs[:, 0] if self.num_beam_groups > 1 else scores.logits[:, 0]
            fined = own.clone() if self.num_beam_groups > 1 else None  # f32 [R, V]
            for group in range(self.num_beam_groups):
                if group not in members:
                    chosen += padding * size
                    continue
                rows = members[group]
                if fined is not None:
                    fined[rows] = own[rows] - self._fine(chosen, own)
                logprobs = own if fined is None else context.process(fined)
                found = self._candidates(logprobs, totals, rows, count, context, scores.asked)
                if not found.ends:
                    continue
                found.group = group
                parts.append(found)
                if fined is not None:
                    (tokens,) = scores.asked.now(found.tokens)
                    chosen += [token for token in tokens if token not in context.eos][:size]
            if not parts:
                if not scores.ended:
                    raise ModelError(f"every continuation is forbidden at step {scores.rows.written}")
                return
            ranks = _joined([part.totals for part in parts])
            groups = [part.group for part in parts for _ in part.ends]
            bests = {part.group: part.best for part in parts}
            enough = _Enough(ending, size, self.num_beam_groups > 1, bests)
            scores = yield Choice(
                _joined([part.rows for part in parts]),
                _joined([part.tokens for part in parts]),
                ranks=ranks,
                width=size,
                groups=groups,
                ends=[end for part in parts for end in part.ends],
                enough=enough,
            )
            totals = ranks[host.sent(scores.survivors, ranks.device)]
            members = {}
            for row, survivor in enumerate(scores.survivors):
                members.setdefault(groups[survivor], []).append(row)
            done = enough.done(scores.ended, scores.rows) if self.num_beam_groups > 1 else set()
            members = {group: rows for group, rows in members.items() if group not in done}

    def _fine(self, chosen: list[int], like: Tensor) -> Tensor:
        """What each token costs after it was chosen by earlier groups; f32 [V]."""
        tokens = host.sent(chosen, like.device)
        return self.diversity_penalty * torch.bincount(tokens, minlength=like.shape[1])

    def _candidates(
        self, logprobs: Tensor, totals: Tensor, rows: list[int], count: int, context: Context, asked: Asked
    ) -> _Candidates:
        """The continuations of one group's rows, best first. logprobs f32 [R, V], totals f32 [R]."""
        vocabulary = logprobs.shape[1]
        size = self.num_beams // self.num_beam_groups
        some = host.sent(rows, logprobs.device) if len(rows) < logprobs.shape[0] else None
        if some is not None:
            logprobs, totals = logprobs[some], totals[some]
        if self.do_sample:
            flat = (logprobs + totals[:, None]).flatten()
            drawn = draw_distinct(flat, count, self.num_beams * vocabulary, context.rng)
            values, order = flat[drawn].sort(descending=True, stable=True)
            places = drawn[order]
            sums, luck = asked.now(values, order)
            ends = [place < self.num_beams for place in luck]
        else:
            values, places = ranked(logprobs, totals, count)
            (sums,) = asked.now(values)
            ends = [place < size for place in range(len(values))]
        if not sums[-1] > -torch.inf:
            possible = sum(value > -torch.inf for value in sums)
            values, places, ends = values[:possible], places[:possible], ends[:possible]
        within = torch.div(places, vocabulary, rounding_mode="floor")
        tokens = places - within * vocabulary
        return _Candidates(within if some is None else some[within], tokens, values, ends, sums[0])


@dataclass
class _Candidates:
    """What one group may continue with, best first."""

    rows: Tensor  # int64 [C]
    tokens: Tensor  # int64 [C]
    totals: Tensor  # f32 [C]
    ends: list[bool]  # [C], whether an end counts
    best: float  # the first total
    group: int = 0


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class _Enough:
    """Whether all groups that took part in a choice are done.

    transformers 5 hopes for the best live row; its groups, from version 4, for the best candidate, ended or not.
    """

    ending: Ending
    size: int
    grouped: bool
    bests: dict[int, float]  # total of each group's best candidate

    def __call__(self, ended: Sequence[Closed], rows: Rows) -> bool:
        return len(self.done(ended, rows)) == len(self.bests)

    def done(self, ended: Sequence[Closed], rows: Rows) -> set[int]:
        found = set()
        for group, best in self.bests.items():
            results = [closed for closed in ended if closed.group == group]
            hope = best if self.grouped else rows.totals[0]
            if self.ending.reached(results, self.size, hope, rows.written):
                found.add(group)
        return found


def ranked(logprobs: Tensor, totals: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest sums of logprobs f32 [R, V] and totals f32 [R], best first: f32 [C] and int64 [C].

    The second are places in the flattened sums. On a CPU only the best of each row are summed up; of equal sums, whose
    order is torch's, all are.
    """
    found = _ranked(logprobs, totals, count) if host.near(logprobs) else None
    if found is not None:
        return found
    flat = (logprobs + totals[:, None]).flatten()
    values, places = flat.topk(min(count, len(flat)))
    return values, places


def _ranked(logprobs: Tensor, totals: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    width = logprobs.shape[1]
    if count >= width:
        return None
    sums, places = [], []
    for number, (row, total) in enumerate(zip(logprobs.numpy(), totals.numpy(), strict=True)):
        best = largest(row, count + 1)  # one more, so that what is left out lies below what is taken
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

"""Beam search: plain, sampled, and in groups that keep away from each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from genctl.decode.types import Choice, Closed, Context, Rows, Scores, Search, Space
from genctl.errors import ModelError
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
                found = self._candidates(logprobs, totals, rows, count, context)
                if not len(found.rows):
                    continue
                found.group = group
                parts.append(found)
                if fined is not None:
                    chosen += [token for token in found.tokens.tolist() if token not in context.eos][:size]
            if not parts:
                if not scores.ended:
                    raise ModelError(f"every continuation is forbidden at step {scores.rows.written}")
                return
            ranks = torch.cat([part.totals for part in parts])
            groups = [part.group for part in parts for _ in part.ends]
            bests = {part.group: float(part.totals[0]) for part in parts}
            enough = _Enough(ending, size, self.num_beam_groups > 1, bests)
            scores = yield Choice(
                torch.cat([part.rows for part in parts]),
                torch.cat([part.tokens for part in parts]),
                ranks=ranks,
                width=size,
                groups=groups,
                ends=[end for part in parts for end in part.ends],
                enough=enough,
            )
            totals = ranks[scores.survivors]
            members = {}
            for row, survivor in enumerate(scores.survivors):
                members.setdefault(groups[survivor], []).append(row)
            done = enough.done(scores.ended, scores.rows) if self.num_beam_groups > 1 else set()
            members = {group: rows for group, rows in members.items() if group not in done}

    def _fine(self, chosen: list[int], like: Tensor) -> Tensor:
        """What each token costs after it was chosen by earlier groups; f32 [V]."""
        tokens = torch.tensor(chosen, dtype=torch.long, device=like.device)
        return self.diversity_penalty * torch.bincount(tokens, minlength=like.shape[1])

    def _candidates(
        self, logprobs: Tensor, totals: Tensor, rows: list[int], count: int, context: Context
    ) -> _Candidates:
        """The continuations of one group's rows, best first. logprobs f32 [R, V], totals f32 [R]."""
        vocabulary = logprobs.shape[1]
        size = self.num_beams // self.num_beam_groups
        index = torch.tensor(rows, device=logprobs.device)
        if len(rows) < len(logprobs):
            logprobs, totals = logprobs[index], totals[index]
        flat = (logprobs + totals[:, None]).flatten()
        if self.do_sample:
            drawn = draw(flat, count, self.num_beams * vocabulary, context.rng)
            values, order = flat[drawn].sort(descending=True, stable=True)
            places = drawn[order]
            ends = [place < self.num_beams for place in order.tolist()]
        else:
            values, places = flat.topk(min(count, len(flat)))
            ends = [place < size for place in range(len(values))]
        possible = int((values > -torch.inf).sum())
        values, places = values[:possible], places[:possible]
        within = torch.div(places, vocabulary, rounding_mode="floor")
        return _Candidates(index[within], places % vocabulary, values, ends[:possible])


@dataclass
class _Candidates:
    """What one group may continue with, best first."""

    rows: Tensor  # int64 [C]
    tokens: Tensor  # int64 [C]
    totals: Tensor  # f32 [C]
    ends: list[bool]  # [C], whether an end counts
    group: int = 0


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


def draw(totals: Tensor, count: int, width: int, rng: torch.Generator) -> Tensor:
    """`count` different indices into totals f32 [W] (W <= width), drawn from its softmax; int64 [count], in that order.

    The largest p / q with q ~ Exp(1), as torch.multinomial does without replacement. Noise is drawn for `width` places,
    those of rows that are not alive included, which keeps the draws equal to transformers'.
    """
    noise = torch.empty(width, device=totals.device).exponential_(1, generator=rng)[: len(totals)]
    return (totals.softmax(0) / noise).topk(min(count, len(totals))).indices

"""Constrained beam search: the best hypotheses among those that hold given phrases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from genctl.decode.types import Choice, Context, FinishedRow, Pruning, Rows, Scores, Search, Space
from genctl.errors import ModelError, UsageError
from genctl.strategies.constraints import Alternatives, Progress, Promises
from genctl.strategies.early_stopping import EarlyStopping, Ending

# Nats that a token of a promise may cost, where a beam has fewer rows than there are banks. With 12 words in 4 rows of
# builtin:stories the best results are better by 0.24 nats a token than with the highest banks in turn.
DEAR, CHEAP = 10.0, 2.0


@dataclass(frozen=True)
class ConstrainedBeam:
    """Beam search in which every phrase of `words` must be written before a hypothesis may end.

    The beam is shared by banks of equally far hypotheses, so that what is kept is not lost to better texts without it
    (dynamic beam allocation: Post & Vilar 2018, arXiv:1804.06609; Hu et al. 2019, N19-1090). The tokens that bring a
    row further are always candidates. Where the tokens that may still be written are just enough for the phrases, only
    what keeps them is: a row misses a phrase only where the processors forbid it, or where something other than EOS
    ends the row before.

    Hypotheses that keep more promises come first. The promises are about new tokens: a phrase in the prompt keeps none.
    """

    num_beams: int
    words: tuple[Alternatives, ...]  # for each promise the phrases of which one must appear
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    n: int = 1
    reserved: int = 0  # last tokens that are not free (forced_eos_token_id)

    needs_hidden: ClassVar[bool] = False
    space: ClassVar[Space] = "logprobs"
    drafts: ClassVar[bool] = False
    independent: ClassVar[bool] = False
    reads_scores: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        return "constrained-beam"

    @property
    def rows(self) -> int:
        return self.num_beams

    def search(self, scores: Scores, context: Context) -> Search:
        promises = Promises(self.words)
        self._check(promises, context, scores.logits.shape[-1])
        ending = Ending(self.length_penalty, self.early_stopping, context.max_new_tokens)
        progress = [promises.begin()]
        totals = scores.logits.new_zeros(1)
        while True:
            flat = scores.logits[:, 0] + totals[:, None]
            room = max(0, context.max_new_tokens - self.reserved - scores.rows.written - 1)  # after this token
            found = self._candidates(flat, progress, promises, context.eos, room)
            if not found.rows:
                if not scores.ended:
                    raise ModelError(f"every continuation is forbidden at step {scores.rows.written}")
                return
            rows = torch.tensor(found.rows, device=flat.device)
            tokens = torch.tensor(found.tokens, device=flat.device)
            totals = flat[rows, tokens]
            kept = [promises.kept(after) for after in found.progress]
            scores = yield Choice(
                rows,
                tokens,
                totals=totals,
                pruning=Pruning(
                    self.num_beams, may_finish=torch.tensor(found.may_finish, device=flat.device), tiers=kept
                ),
                notes=[f"{count}/{len(promises)}" for count in kept],
                is_done=_PromisesKept(ending, self.num_beams, found.best, len(promises)),
            )
            totals = totals[scores.survivors]
            progress = [found.progress[survivor] for survivor in scores.survivors]

    def _check(self, promises: Promises, context: Context, vocabulary: int) -> None:
        room = context.max_new_tokens - self.reserved
        if not promises.fits(promises.begin(), room) and (least := promises.least()) > room:
            but = f"max_new_tokens = {context.max_new_tokens}"
            if self.reserved:
                but += " and forced_eos_token_id takes the last one"
            raise UsageError(f"the forced words need {least} tokens or more, but {but}")
        for token in sorted(promises.tokens):
            if token >= vocabulary:
                raise UsageError(f"force_words_ids: {token} is not a token of this checkpoint (0 to {vocabulary - 1})")
            if token in context.eos:
                raise UsageError(f"force_words_ids: {token} ends a sequence, so no phrase can hold it")

    def _candidates(
        self, flat: Tensor, progress: Sequence[Progress], promises: Promises, eos: tuple[int, ...], room: int
    ) -> _Candidates:
        """What may follow: ends of rows that keep all promises, then the others, bank by bank in turn.

        flat f32 [R, V]; `room` is how many tokens may follow the next one.
        """
        values, tokens = flat.topk(min(self.num_beams + len(eos), flat.shape[1]))
        usual: list[_Candidate] = []
        ends: list[_Candidate] = []
        for row, line in enumerate(zip(values.tolist(), tokens.tolist(), strict=True)):
            for total, token in zip(*line, strict=True):
                if total > -torch.inf:
                    (ends if token in eos else usual).append(_Candidate(total, row, token, progress[row]))
        taken = {(one.row, one.token) for one in usual}
        wanted = [
            (row, token)
            for row, here in enumerate(progress)
            for token in promises.next_tokens(here)
            if (row, token) not in taken
        ]
        if wanted:
            rows, forced = zip(*wanted, strict=True)
            sums = flat[list(rows), list(forced)].tolist()
            usual += [
                _Candidate(total, row, token, progress[row])
                for (row, token), total in zip(wanted, sums, strict=True)
                if total > -torch.inf
            ]
        best = max((one.total for one in (*usual, *ends)), default=-torch.inf)
        usual = [one._replace(progress=promises.step(one.progress, one.token)) for one in usual]
        usual = [one for one in usual if promises.fits(one.progress, room)] or usual
        banks = [-promises.lacking(one.progress) for one in usual]
        order = share_out(banks, [one.total for one in usual], self.num_beams)
        chosen = [usual[index] for index in order[: 2 * self.num_beams]]
        counted = self._ends(ends, usual, chosen[: self.num_beams])
        return _Candidates(
            [one.row for one in (*counted, *chosen)],
            [one.token for one in (*counted, *chosen)],
            [one.progress for one in (*counted, *chosen)],
            [True] * (len(counted) + min(self.num_beams, len(chosen))) + [False] * (len(chosen) - self.num_beams),
            best,
        )

    def _ends(
        self, ends: Sequence[_Candidate], usual: Sequence[_Candidate], chosen: Sequence[_Candidate]
    ) -> list[_Candidate]:
        """The ends that are results: among the best of all, or as good as what the bank of complete rows keeps."""
        complete = [one.total for one in (*usual, *ends) if one.progress.complete]
        everything = [one.total for one in (*usual, *ends)]
        places = max(1, sum(one.progress.complete for one in chosen))
        going = {one.row for one in usual}
        return [
            one
            for one in ends
            if (
                one.progress.complete
                and (_place(one.total, complete) < places or _place(one.total, everything) < self.num_beams)
            )
            or one.row not in going  # nothing else may follow
        ]


class _Candidate(NamedTuple):
    """A continuation of one row."""

    total: float
    row: int
    token: int
    progress: Progress  # with the token


@dataclass(frozen=True)
class _Candidates:
    """Continuations with the progress after each."""

    rows: list[int]
    tokens: list[int]
    progress: list[Progress]
    may_finish: list[bool]  # whether an end is a result: the others are at hand where rows end
    best: float  # the largest total among all continuations, ends included


@dataclass(frozen=True)
class _PromisesKept:
    """Whether there are `capacity` results that keep their promises, and nothing better is expected."""

    ending: Ending
    capacity: int
    best: float
    promises: int

    def __call__(self, ended: Sequence[FinishedRow], rows: Rows, totals: Sequence[float]) -> bool:
        complete = [row for row in ended if row.tier == self.promises]
        return self.ending.reached(complete, self.capacity, self.best, rows.written)


def _place(total: float, totals: Sequence[float]) -> int:
    return sum(other > total for other in totals)


def share_out(banks: Sequence[int], totals: Sequence[float], width: int) -> list[int]:
    """An order of candidates of which the first `width` are kept: they come from as many banks as there are places.

    Where there are more banks than places, the highest bank has the first place, and each other place is for the best
    candidate at a price: what a token of a promise may cost, from `DEAR` to `CHEAP` nats. Going to the highest banks in
    turn, as with fewer banks, would write all phrases at once, whether they fit or not.
    """
    if len(set(banks)) <= width:
        return in_turn(banks, totals)
    order = [max(range(len(banks)), key=lambda index: (banks[index], totals[index]))]
    left = set(range(len(banks))) - set(order)
    price = DEAR
    for place in range(width - 1):
        price = DEAR - (DEAR - CHEAP) * place / max(1, width - 2)
        order.append(max(sorted(left), key=lambda index: totals[index] + price * banks[index]))
        left.discard(order[-1])
    return order + sorted(left, key=lambda index: (-totals[index] - price * banks[index], index))


def in_turn(banks: Sequence[int], totals: Sequence[float]) -> list[int]:
    """An order that takes the best of each bank, the highest bank first, then the second best of each, and so on."""
    best_first = sorted(range(len(banks)), key=lambda index: (-banks[index], -totals[index]))
    depth: dict[int, int] = {}
    depths = []
    for index in best_first:
        depths.append(depth.get(banks[index], 0))
        depth[banks[index]] = depths[-1] + 1
    return [index for _, index in sorted(zip(depths, best_first, strict=True), key=lambda pair: pair[0])]

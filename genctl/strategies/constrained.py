"""Constrained beam search: the best hypotheses that contain given phrases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from genctl.decode.types import Choice, Context, FinishedRow, Pruning, Rows, Scores, Search, Traits
from genctl.errors import ModelError, UsageError
from genctl.strategies.beam import EarlyStopping, EarlyStoppingRule
from genctl.strategies.constraints import Alternatives, Constraints, Progress

# Nats that a token of a constraint may cost if a beam has fewer rows than banks. With 12 words in 4 rows of
# builtin:stories the best results gain 0.24 nats per token over taking the highest banks in turn.
DEAR, CHEAP = 10.0, 2.0


@dataclass(frozen=True)
class ConstrainedBeam:
    """Beam search in which every phrase of `words` must be written before a hypothesis may end.

    The beam is divided among banks of hypotheses with equal progress, so that progress is not lost to better texts
    without it (dynamic beam allocation: Post & Vilar 2018, arXiv:1804.06609; Hu et al. 2019, N19-1090). Tokens that
    advance a constraint are always candidates. When the remaining tokens are just enough for the phrases, only
    candidates that keep them possible remain: a row misses a phrase only if the processors forbid it, or if something
    other than EOS ends the row earlier.

    Hypotheses that satisfy more constraints come first. Only new tokens count: a phrase in the prompt satisfies
    nothing.
    """

    beams: int
    words: tuple[Alternatives, ...]  # for each constraint its alternative phrases
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    n: int = 1
    reserved: int = 0  # last tokens that are not free (forced_eos_token_id)

    kind: ClassVar[str] = "constrained-beam"
    traits: ClassVar[Traits] = Traits("logprobs", reads_scores=True)

    @property
    def max_rows(self) -> int:
        return self.beams

    def search(self, scores: Scores, context: Context) -> Search:
        constraints = Constraints(self.words)
        self._check(constraints, context, scores.logits.shape[-1])
        rule = EarlyStoppingRule(self.length_penalty, self.early_stopping, context.max_new_tokens)
        progress = [constraints.begin()]
        totals = scores.logits.new_zeros(1)
        while True:
            flat = scores.logits[:, 0] + totals[:, None]
            room = max(0, context.max_new_tokens - self.reserved - scores.rows.written - 1)  # after this token
            candidates, finishing, best = self._candidates(flat, progress, constraints, context.eos, room)
            if not candidates:
                if not scores.ended:
                    raise ModelError(f"every continuation is forbidden at step {scores.rows.written}")
                return
            rows = torch.tensor([candidate.row for candidate in candidates], device=flat.device)
            tokens = torch.tensor([candidate.token for candidate in candidates], device=flat.device)
            totals = flat[rows, tokens]
            satisfied = [constraints.satisfied(candidate.progress) for candidate in candidates]
            may_finish = torch.arange(len(candidates), device=flat.device) < finishing
            scores = yield Choice(
                rows,
                tokens,
                totals=totals,
                pruning=Pruning(self.beams, may_finish=may_finish, tiers=satisfied),
                notes=[f"{count}/{len(constraints)}" for count in satisfied],
                is_done=partial(self._is_done, rule, best, len(constraints)),
            )
            totals = totals[scores.survivors]
            progress = [candidates[survivor].progress for survivor in scores.survivors]

    def _is_done(
        self, rule: EarlyStoppingRule, best: float, all_of: int, ended: Sequence[FinishedRow], rows: Rows, _: object
    ) -> bool:
        """Whether `beams` results satisfy all constraints, and a row with `best` is not expected to beat them."""
        return rule.reached([row for row in ended if row.tier == all_of], self.beams, best, rows.written)

    def _check(self, constraints: Constraints, context: Context, vocabulary: int) -> None:
        room = context.max_new_tokens - self.reserved
        begin = constraints.begin()
        if not constraints.fits(begin, room):
            but = f"max_new_tokens = {context.max_new_tokens}"
            if self.reserved:
                but += " and forced_eos_token_id takes the last one"
            raise UsageError(f"the forced words need {constraints.needed(begin)} tokens or more, but {but}")
        for token in sorted(constraints.tokens):
            if token >= vocabulary:
                raise UsageError(f"force_words_ids: {token} is not a token of this checkpoint (0 to {vocabulary - 1})")
            if token in context.eos:
                raise UsageError(f"force_words_ids: {token} ends a sequence, so no phrase can hold it")

    def _candidates(
        self, flat: Tensor, progress: Sequence[Progress], constraints: Constraints, eos: tuple[int, ...], room: int
    ) -> tuple[list[_Candidate], int, float]:
        """The candidates: ends of rows that satisfy all constraints, then the others, bank by bank in turn.

        Also returns how many of them may end as a result (the others replace rows that end), and the largest total
        among all continuations. flat f32 [R, V]; `room` is how many tokens may follow the next one.
        """
        probable = flat.topk(min(self.beams + len(eos), flat.shape[1])).indices.tolist()
        places = [(row, token) for row, tokens in enumerate(probable) for token in tokens]
        places += [(row, token) for row, here in enumerate(progress) for token in constraints.next_tokens(here)]
        places = list(dict.fromkeys(places))
        totals = flat[[row for row, _ in places], [token for _, token in places]].tolist()
        every = [
            _Candidate(total, row, token, constraints.step(progress[row], token))
            for total, (row, token) in zip(totals, places, strict=True)
            if total > -torch.inf
        ]
        best = max((candidate.total for candidate in every), default=-torch.inf)
        ends = [candidate for candidate in every if candidate.token in eos]
        usual = [candidate for candidate in every if candidate.token not in eos]
        usual = [candidate for candidate in usual if constraints.fits(candidate.progress, room)] or usual
        banks = [-constraints.lacking(candidate.progress) for candidate in usual]
        order = share_out(banks, [candidate.total for candidate in usual], self.beams)
        chosen = [usual[index] for index in order[: 2 * self.beams]]
        # a complete end is a result if it is among the best of all, or as good as the bank of complete rows
        everything = [candidate.total for candidate in (*usual, *ends)]
        complete = [candidate.total for candidate in (*usual, *ends) if candidate.progress.complete]
        open_places = max(1, sum(candidate.progress.complete for candidate in chosen[: self.beams]))
        going = {candidate.row for candidate in usual}
        counted = [
            end
            for end in ends
            if end.row not in going  # an end is the only continuation of this row
            or (end.progress.complete and _place(end.total, complete) < open_places)
            or (end.progress.complete and _place(end.total, everything) < self.beams)
        ]
        return [*counted, *chosen], len(counted) + self.beams, best


class _Candidate(NamedTuple):
    """A continuation of one row."""

    total: float
    row: int
    token: int
    progress: Progress  # with the token


def _place(total: float, totals: Sequence[float]) -> int:
    return sum(other > total for other in totals)


def share_out(banks: Sequence[int], totals: Sequence[float], width: int) -> list[int]:
    """Order the candidates. The first `width` stay, and come from as many banks as possible.

    If there are more banks than places, the highest bank gets the first place, and each other place goes to the best
    candidate after a bonus for each token of a constraint, from `DEAR` to `CHEAP` nats. Taking the highest banks in
    turn, as with fewer banks, would write all phrases at once, even if they do not fit the text.
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
    """The order that takes the best of each bank, highest bank first, then the second best of each, and so on."""
    best_first = sorted(range(len(banks)), key=lambda index: (-banks[index], -totals[index]))
    size: dict[int, int] = {}  # of each bank so far
    depths = [0] * len(banks)  # of each candidate in its bank
    for index in best_first:
        depths[index] = size[banks[index]] = size.get(banks[index], -1) + 1
    return sorted(best_first, key=depths.__getitem__)

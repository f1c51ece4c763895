"""Constrained beam search: the best hypotheses among those that hold given phrases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from genctl.decode.types import Choice, Closed, Context, Rows, Scores, Search, Space
from genctl.errors import ModelError, UsageError
from genctl.strategies.ending import EarlyStopping, Ending
from genctl.strategies.promises import Alternatives, Progress, Promises


@dataclass(frozen=True)
class ConstrainedBeam:
    """Beam search in which every phrase of `words` must be written before a hypothesis may end.

    The beam is filled in turn from banks of equally far hypotheses (Post & Vilar 2018, arXiv:1804.06609), each of them
    with the tokens that would bring it further; equal to transformers 4's `force_words_ids`, except that only new
    tokens count (a phrase in the prompt keeps no promise) and that a hypothesis without its phrases, which the length
    limit can leave behind, comes after all that have them.
    """

    num_beams: int
    words: tuple[Alternatives, ...]  # for each promise the phrases of which one must appear
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    n: int = 1

    needs_hidden: ClassVar[bool] = False
    space: ClassVar[Space] = "logprobs"
    drafts: ClassVar[bool] = False

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
        count = max(2, 1 + len(context.eos)) * self.num_beams
        progress = [promises.begin()]
        totals = scores.logits.new_zeros(1)
        while True:
            flat = scores.logits[:, 0] + totals[:, None]
            found = self._candidates(flat, progress, promises, count, context.eos)
            if not found.rows:
                if not scores.ended:
                    raise ModelError(f"every continuation is forbidden at step {scores.rows.written}")
                return
            rows = torch.tensor(found.rows, device=flat.device)
            tokens = torch.tensor(found.tokens, device=flat.device)
            ranks = flat[rows, tokens]
            scores = yield Choice(
                rows,
                tokens,
                ranks=ranks,
                width=self.num_beams,
                ends=[True] * len(rows),
                standing=[int(after.complete) for after in found.progress],
                notes=[f"{after.kept}/{len(promises)}" for after in found.progress],
                enough=_Enough(ending, self.num_beams, found.best),
            )
            totals = ranks[scores.survivors]
            progress = [found.progress[survivor] for survivor in scores.survivors]

    def _check(self, promises: Promises, context: Context, vocabulary: int) -> None:
        if promises.least > context.max_new_tokens:
            raise UsageError(
                f"the forced words need {promises.least} tokens or more, but max_new_tokens = {context.max_new_tokens}"
            )
        for token in sorted(promises.tokens):
            if token >= vocabulary:
                raise UsageError(f"force_words_ids: {token} is not a token of this checkpoint (0 to {vocabulary - 1})")
            if token in context.eos:
                raise UsageError(f"force_words_ids: {token} ends a sequence, so no phrase can hold it")

    def _candidates(
        self, flat: Tensor, progress: Sequence[Progress], promises: Promises, count: int, eos: tuple[int, ...]
    ) -> _Candidates:
        """What may follow: ends of complete rows, then `num_beams` others, bank by bank in turn. flat f32 [R, V]."""
        vocabulary = flat.shape[1]
        values, places = flat.flatten().topk(min(count, flat.numel()))
        possible = [(v, p) for v, p in zip(values.tolist(), places.tolist(), strict=True) if v > -torch.inf]
        found = _Candidates([], [], [], possible[0][0] if possible else -torch.inf)
        usual: list[tuple[int, int, float]] = []  # row, token, total
        for place, (total, where) in enumerate(possible):
            row, token = divmod(where, vocabulary)
            if token not in eos:
                usual.append((row, token, total))
            elif place < self.num_beams and progress[row].complete:
                found.add(row, token, progress[row])
            if len(usual) == self.num_beams:
                break
        taken = {(row, token) for row, token, _ in usual}
        wanted = [
            (row, token)
            for row, here in enumerate(progress)
            if not here.complete
            for token in promises.next_tokens(here)
            if (row, token) not in taken
        ]
        if wanted:
            rows, tokens = zip(*wanted, strict=True)
            forced = flat[list(rows), list(tokens)].tolist()
            usual += [(*pair, total) for pair, total in zip(wanted, forced, strict=True) if total > -torch.inf]
        states = [promises.step(progress[row], token) for row, token, _ in usual]
        order = list(range(len(usual)))
        if len(usual) > len(taken):
            order = in_turn([promises.bank(state) for state in states], [total for _, _, total in usual])
        for index in order[: self.num_beams]:
            found.add(usual[index][0], usual[index][1], states[index])
        return found


@dataclass
class _Candidates:
    """Continuations with the progress after each."""

    rows: list[int]
    tokens: list[int]
    progress: list[Progress]
    best: float  # the largest total among all continuations, ends included

    def add(self, row: int, token: int, progress: Progress) -> None:
        self.rows.append(row)
        self.tokens.append(token)
        self.progress.append(progress)


@dataclass(frozen=True)
class _Enough:
    """Whether there are `capacity` results that keep their promises, and nothing better is expected."""

    ending: Ending
    capacity: int
    best: float

    def __call__(self, ended: Sequence[Closed], rows: Rows) -> bool:
        return self.ending.reached([c for c in ended if c.standing], self.capacity, self.best, rows.written)


def in_turn(banks: Sequence[int], totals: Sequence[float]) -> list[int]:
    """An order that takes the best of each bank, the highest bank first, then the second best of each, and so on."""
    best_first = sorted(range(len(banks)), key=lambda index: (-banks[index], -totals[index]))
    depth: dict[int, int] = {}
    depths = []
    for index in best_first:
        depths.append(depth.get(banks[index], 0))
        depth[banks[index]] = depths[-1] + 1
    return [index for _, index in sorted(zip(depths, best_first, strict=True), key=lambda pair: pair[0])]

"""Assisted (speculative) decoding: a drafter proposes tokens, the model verifies all of them in one pass.

The text is the same as without drafts, greedy or sampled: the n-th new token is chosen with the n-th draw of the row,
and a drafted token is accepted if it equals the chosen token. A drafter with a model of its own draws with the same
noise (Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative decoding"), so that its
acceptance rate is at least half of the best possible one.

The number of drafted tokens is fixed, or as high as pays. Drafts pay if the accepted tokens outweigh the longer pass
that verifies them and the passes that draft them (arXiv:2211.17192, section 3.3). Each drafted token has an estimated
acceptance rate. A model has two, for the first token of a draft and for those after an accepted one; without a model,
see `drafters.rate_of`.

Nothing here reads the clock: costs come from a table (`decode.step_costs`, which also weighs the drafts of a pass).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from genctl.decode import transfer
from genctl.decode.step_costs import MOST_TOKENS, PassPlan
from genctl.decode.types import Context, Draft, RowsOfLane, Scores, Search, Traits
from genctl.events import shared_length
from genctl.params import MOST_DRAFTED
from genctl.strategies.drafters import Rate, learn, promise, seldom
from genctl.strategies.sample import Sample, best

if TYPE_CHECKING:
    from genctl.decode.processors.rows import RowCandidates
    from genctl.strategies.drafters import Drafter
    from genctl.strategies.sampling import Sampler


PAUSE = 8  # steps before a drafter that does not pay is tried again; doubled each time
LONGEST_PAUSE = 128
PATIENCE = 12  # steps in a row in which a drafter without a model is called although nothing pays
FIRST, LATER = 0.5, 0.7  # first guesses of a model's rates, for the first token and for those after an accepted one


@dataclass(frozen=True)
class Assisted:
    """One row, several tokens per pass.

    It drafts `num_assistant_tokens` at a time, or with `price` at most that many (see above). Without a number it
    drafts as many as pay. A model drafter stops at a token with a probability below `assistant_confidence_threshold`.
    An `unasked` drafter changes only the speed: records name the strategy without drafts.
    """

    drafter: Drafter
    do_sample: bool = False
    num_assistant_tokens: int | None = None  # None: `MOST_DRAFTED`
    price: bool | None = None  # whether it drafts as many as pay; None: without a number
    assistant_confidence_threshold: float = 0.4
    sampler: Sampler = "multinomial"
    length_penalty: float = 1.0  # only for the reported score
    unasked: bool = False

    n: ClassVar[int] = 1
    max_rows: ClassVar[int] = 1

    @property
    def kind(self) -> str:
        return self.plain.kind if self.unasked else self.drafter.kind

    @cached_property
    def traits(self) -> Traits:
        return Traits(drafts=not self.unasked, independent=True)

    @cached_property
    def plain(self) -> Sample:
        """The same strategy without drafts."""
        return Sample(self.do_sample, 1, self.length_penalty, self.sampler)

    @property
    def drafts_what_pays(self) -> bool:
        """Whether as many tokens are drafted as pay."""
        return self.num_assistant_tokens is None if self.price is None else self.price

    def search(self, scores: Scores, context: Context) -> Search:
        return self.plain.search(scores, context)

    def tokens(self, logits: Tensor, lanes: Iterable[RowsOfLane], left: Sequence[RowCandidates] | None) -> Tensor:
        """One token for each row, as without drafts (see `Sample`)."""
        return self.plain.tokens(logits, lanes, left)

    def begin(self, context: Context) -> Drafts:
        """The drafts of a lane."""
        return Drafts(self, context)

    def verify(self, logits: Tensor, draft: Draft, rows: RowsOfLane) -> tuple[int, int]:
        """The number of accepted draft tokens, and the token after them.

        logits f32 [D+1, V], processed, after the lane's row and after each token of the draft.
        """
        rng, places = rows.rng, range(len(logits))
        if not self.do_sample:
            chosen = best(logits).tolist()
        elif transfer.on_host(logits):
            chosen = []
            for place in places:  # stop at the first token that differs from the draft
                chosen.append(int(self._drawn(logits, place, rows)))
                if chosen[place:] != draft.tokens[place : place + 1]:
                    break
        else:  # one synchronisation for all
            drawn, states = [], []
            for place in places:
                drawn.append(self._drawn(logits, place, rows))
                states.append(rng.get_state())
            chosen = torch.cat(drawn).tolist()
            rng.set_state(states[shared_length(draft.tokens, chosen)])
        accepted = shared_length(draft.tokens, chosen)
        return accepted, chosen[accepted]

    def _drawn(self, logits: Tensor, place: int, rows: RowsOfLane) -> Tensor:
        return self.tokens(logits[place][None], [rows._replace(position=rows.position + place)], None)


class Drafts:
    """The drafts of one lane: its text, the draft on trial, and how often the drafter was right."""

    def __init__(self, strategy: Assisted, context: Context) -> None:
        self.strategy, self.context = strategy, context
        draw = self._draw if strategy.do_sample else None
        self.propose = strategy.drafter.begin(context, draw, strategy.assistant_confidence_threshold)
        self.text: list[int] = context.prefix.tokens[0].tolist()
        self.trial: Draft | None = None  # what was drafted last,
        self.tried = 0  # and how many tokens of it are checked
        self.first, self.later = Rate.guess(FIRST), Rate.guess(LATER)  # of a model's tokens
        # if drafting does not pay, a model pauses for `pause` steps, and a free drafter runs every `seldom` steps
        self.pause, self.waited, self.seldom = PAUSE, 0, seldom(context.model.pass_price)
        self.most = strategy.num_assistant_tokens or MOST_DRAFTED
        model, drafter = context.model, getattr(strategy.drafter, "forward", None)
        # the price of a drafted token, in steps of the model; drafts without a model cost next to nothing
        self.cost = 0.0 if drafter is None else drafter.pass_price.step / model.pass_price.step
        self.free = drafter is None
        self.watchful = self.free and strategy.drafts_what_pays

    def rests(self) -> bool:
        """Whether nothing is drafted in this step. Counts the step."""
        if not self.watchful:
            return False
        self.waited += 1
        return self.waited > PATIENCE and self.waited % self.seldom > 0

    def next(self, written: Sequence[int], plan: PassPlan) -> Draft | None:
        """The draft for the next pass, after the new tokens `written`; None if there is none, or none that pays."""
        context = self.context
        tried, self.trial = self.trial, None
        if tried is not None and written:  # learn from the last draft
            learn(tried.rates[: self.tried or 1], shared_length(tried.tokens, written))
        self.text += written
        room = context.max_new_tokens - (len(self.text) - context.prefix.tokens.shape[1]) - 1
        # verification must use the same rotary frequencies as later passes over the accepted tokens
        most = int(min(self.most, room, context.model.draft_room(len(self.text))))
        if most < 1:
            return None
        if self.watchful:
            return self._free(most, plan)
        if not self.strategy.drafts_what_pays:
            return self._try(self._proposed(most))
        count = plan.best(promise(self._rates(most)), self.cost)
        if count:
            self.pause, self.waited = PAUSE, 0
        elif self.waited < self.pause:
            self.waited += 1
            return None
        else:  # it is tried again, each time after a longer pause
            self.pause, self.waited = min(2 * self.pause, LONGEST_PAUSE), 0
        return self._try(self._proposed(count or 1), plan)

    def end(self, written: Sequence[int]) -> None:
        """End the lane after these tokens. A drafter that learns from texts keeps its text."""
        keep = getattr(self.strategy.drafter, "keep", None)
        if keep is not None:
            keep([*self.text, *written])

    def _free(self, most: int, plan: PassPlan) -> Draft | None:
        """A draft without a model. If it is not tried, the next tokens still show whether it was right."""
        draft = self._proposed(min(most, MOST_TOKENS))
        count = plan.best(promise(draft.rates))
        if not count:
            self.trial, self.tried = draft, 0
            return None
        self.waited = 0
        return self._try(Draft(draft.tokens[:count], draft.rates[:count]), plan)

    def _try(self, draft: Draft, plan: PassPlan | None = None) -> Draft | None:
        if not draft.tokens:
            return None
        if plan is not None:
            plan.take(promise(draft.rates), self.cost)
        self.trial, self.tried = draft, len(draft.tokens)
        return draft

    def _proposed(self, count: int) -> Draft:
        if self.free:
            return self.propose(self.text, count)
        rng = self.context.rng
        before = rng.get_state()
        try:
            draft = self.propose(self.text, count)
        finally:
            rng.set_state(before)  # verification uses the same draws
        return Draft(draft.tokens, self._rates(len(draft.tokens)))

    def _rates(self, count: int) -> list[Rate]:
        return [self.first, *[self.later] * (count - 1)]

    def _draw(self, scores: Tensor, before: int) -> int:
        """The token drawn from scores f32 [1, V] after `before` new tokens, with the next draw of the row."""
        return int(self.strategy.tokens(scores, [RowsOfLane(self.context.rng, (0,), 1, before)], None))

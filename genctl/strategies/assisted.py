"""Assisted (speculative) decoding: a drafter proposes tokens, the model verifies all of them in one pass.

The text is the one that is written without drafts, greedy or sampled: the n-th new token is chosen with the n-th draw
of the row, and a drafted token is accepted if it is the token that is chosen. A drafter with a model of its own draws
with the same noise (Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative decoding"),
which accepts at least half as often as the best that is possible. `draft_sampling` "rejection" accepts more (Leviathan
et al. 2023, arXiv:2211.17192, algorithm 1) and follows the same distribution; its text depends on the drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from genctl.decode import transfer
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Choice, Context, RowsOfLane, Scores, Search, Traits
from genctl.params import MOST_DRAFTED
from genctl.sequences import shared_length
from genctl.strategies.draft_length import Constant, DraftLength, Priced, Schedule
from genctl.strategies.draft_models import Draft, Drafter, Draw
from genctl.strategies.sample import Sample, best

if TYPE_CHECKING:
    from genctl.strategies.sampling import Sampler


@dataclass(frozen=True)
class Assisted:
    """One row, several tokens per pass.

    `num_assistant_tokens` are drafted at a time, with "price" at most (see `draft_length`). Without a number and a
    schedule it drafts as many as pay; with rejection sampling it does not: a seed keeps its text, which depends on the
    numbers there. Each prompt begins anew, so that its output does not depend on the prompts before it. A model drafter
    stops at a token with a probability below `assistant_confidence_threshold`.
    """

    drafter: Drafter
    do_sample: bool = False
    num_assistant_tokens: int | None = None  # None: `MOST_DRAFTED`
    num_assistant_tokens_schedule: Schedule | None = None
    assistant_confidence_threshold: float = 0.4
    sampler: Sampler = "multinomial"
    draft_sampling: Literal["coupled", "rejection"] = "coupled"

    n: ClassVar[int] = 1
    max_rows: ClassVar[int] = 1
    length_penalty: ClassVar[float] = 1.0

    @property
    def kind(self) -> str:
        return self.drafter.kind

    @property
    def traits(self) -> Traits:
        return Traits(drafts=True, independent=True, reads_scores=self.do_sample)

    def search(self, scores: Scores, context: Context) -> Search:
        draw = self._draw(context.rng) if self.do_sample else None
        propose = self.drafter.begin(context, draw, self.assistant_confidence_threshold)
        row = torch.zeros(1, dtype=torch.long, device=scores.logits.device)
        # drafts without a model cost next to nothing
        drafting_model: ModelRuntime | None = getattr(self.drafter, "forward", None)
        length, draft = self._length(context, drafting_model), Draft([])
        text = scores.rows.tokens[0].tolist()
        eos = frozenset(context.eos)
        guess: int | None = None  # the first token of a draft that costs nothing and was not tried
        while True:
            accepted, token = self._verify(scores.logits[0], draft, context.rng, scores.rows.written)
            if draft.tokens:
                length.observe(len(draft.tokens), accepted)
            elif guess is not None:
                length.observe(1, int(guess == token))
            written = [*draft.tokens[:accepted], token]
            text += written
            note = f"{accepted} of {len(draft.tokens)} drafts" if draft.tokens else ""
            # the pass that checks a draft also writes one further token
            room = context.max_new_tokens - scores.rows.written - len(written) - 1
            # the check must use the rotary frequencies with which the accepted tokens are read later
            room = min(room, context.model.draft_room(len(text)))
            draft, guess = Draft([]), None
            if room > 0 and eos.isdisjoint(written):
                count = min(length.next(), int(room))
                if count or drafting_model is None:
                    before = context.rng.get_state()
                    draft = propose(text, max(count, 1))
                    if not self.rejects:  # the same draws decide
                        context.rng.set_state(before)
                if not count and draft.tokens:
                    draft, guess = Draft([]), draft.tokens[0]
            tried = row.new_tensor([[draft.tokens]]) if draft.tokens else None
            scores = yield Choice(row, row.new_tensor([token]), accepted=accepted, draft=tried, notes=[note])

    def _length(self, context: Context, drafting_model: ModelRuntime | None) -> DraftLength:
        """The numbers of drafted tokens of one lane. Drafts without a model have no price."""
        most, schedule = self.num_assistant_tokens, self.num_assistant_tokens_schedule
        if schedule is None:
            schedule = "price" if most is None and not self.rejects else "constant"
        most = most or MOST_DRAFTED
        if schedule == "constant":
            return Constant(most)
        price = context.model.pass_price
        check = partial(price.check, cached=context.prefix.cache is not None)
        draft = 0.0 if drafting_model is None else drafting_model.pass_price.step / price.step
        return Priced(most, check, draft)

    @property
    def rejects(self) -> bool:
        """Whether drafts change the text that a seed writes."""
        return self.do_sample and self.draft_sampling == "rejection"

    def _draw(self, rng: torch.Generator) -> Draw:
        """How a token is drawn with the next draw of the row."""
        if self.rejects:
            return lambda scores, before: int(torch.multinomial(scores[0].softmax(-1), 1, generator=rng))
        return lambda scores, before: int(self._drawn(scores, rng, before))

    def _drawn(self, scores: Tensor, rng: torch.Generator, before: int) -> Tensor:
        """What `Sample` draws after `before` new tokens. scores f32 [1, V] -> int64 [1]."""
        return Sample(True, sampler=self.sampler).tokens(scores, [RowsOfLane(rng, (0,), 1, before)], None)

    def _verify(self, logits: Tensor, draft: Draft, rng: torch.Generator, before: int) -> tuple[int, int]:
        """The number of accepted draft tokens, and the token after them.

        logits f32 [D+1, V], processed, after `before` new tokens and after each token of the draft.
        """
        if self.rejects:
            return _verified_by_rejection(logits, draft, rng)
        if not self.do_sample:
            chosen = best(logits).tolist()
        elif transfer.on_host(logits):
            chosen = []
            for place, scores in enumerate(logits):  # what comes after a token that is not the draft's is never drawn
                chosen.append(int(self._drawn(scores[None], rng, before + place)))
                if chosen[place:] != draft.tokens[place : place + 1]:
                    break
        else:  # one wait for all
            drawn, states = [], []
            for place, scores in enumerate(logits):
                drawn.append(self._drawn(scores[None], rng, before + place))
                states.append(rng.get_state())
            chosen = torch.cat(drawn).tolist()
            rng.set_state(states[shared_length(draft.tokens, chosen)])
        accepted = shared_length(draft.tokens, chosen)
        return accepted, chosen[accepted]


def _verified_by_rejection(logits: Tensor, draft: Draft, rng: torch.Generator) -> tuple[int, int]:
    """`Assisted._verify` by algorithm 1 of arXiv:2211.17192, with the draws of transformers."""
    target = logits.softmax(-1)  # p [D+1, V]
    uniform = torch.rand(len(draft.tokens), generator=rng, device=logits.device).tolist()
    for place, token in enumerate(draft.tokens):
        drawn = None if draft.distributions is None else draft.distributions[place]  # q [V]
        if uniform[place] * (1.0 if drawn is None else float(drawn[token])) < float(target[place, token]):
            continue
        residual = _residual(target[place], drawn, token)
        return place, int(torch.multinomial(residual, 1, generator=rng))
    return len(draft.tokens), int(torch.multinomial(target[-1], 1, generator=rng))


def _residual(target: Tensor, drawn: Tensor | None, token: int) -> Tensor:
    """max(p - q, 0), f32 [V], after `token` was rejected; q is one-hot for a deterministic drafter. Not normalised."""
    if drawn is None:
        left = target.clone()
        left[token] = 0.0
    else:
        left = (target - drawn).clamp(min=0.0)
    # the difference of p and q may round to zero
    return left if float(left.sum()) > 0.0 else target

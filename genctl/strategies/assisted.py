"""Assisted (speculative) decoding: a drafter proposes tokens, the model verifies all of them in one pass.

Greedy output equals plain greedy decoding, token for token. Sampled output follows the model's own distribution exactly
(Leviathan et al. 2023, arXiv:2211.17192, algorithm 1): both distributions are taken after the processors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Choice, Context, Scores, Search, Traits
from genctl.params import MOST_DRAFTED
from genctl.sequences import shared_length
from genctl.strategies.draft_length import Constant, DraftLength, Heuristic, Priced, Schedule
from genctl.strategies.draft_models import Draft, Drafter
from genctl.strategies.sample import best


@dataclass(frozen=True)
class Assisted:
    """One row, several tokens per pass.

    `num_assistant_tokens` are drafted at a time: at first, with a heuristic schedule, and at most, with "price" (see
    `draft_length`). Greedy search without a number and a schedule drafts as many as pay. A sample does not: its draws
    depend on the numbers, and a seed keeps its text. Each prompt begins anew, so that its output does not depend on the
    prompts before it. A model drafter stops at a token with a probability below `assistant_confidence_threshold`.
    """

    drafter: Drafter
    do_sample: bool = False
    num_assistant_tokens: int | None = None  # None: `MOST_DRAFTED`
    num_assistant_tokens_schedule: Schedule | None = None
    assistant_confidence_threshold: float = 0.4

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
        propose = self.drafter.begin(context, self.do_sample, self.assistant_confidence_threshold)
        row = torch.zeros(1, dtype=torch.long, device=scores.logits.device)
        # drafts without a model cost next to nothing
        drafting_model: ModelRuntime | None = getattr(self.drafter, "forward", None)
        length, draft = self._length(context, drafting_model), Draft([])
        text = scores.rows.tokens[0].tolist()
        eos = frozenset(context.eos)
        guess: int | None = None  # the first token of a draft that costs nothing and was not tried
        while True:
            accepted, token = self._verify(scores.logits[0], draft, context.rng)
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
                    draft = propose(text, max(count, 1))
                if not count and draft.tokens:
                    draft, guess = Draft([]), draft.tokens[0]
            tried = row.new_tensor([[draft.tokens]]) if draft.tokens else None
            scores = yield Choice(row, row.new_tensor([token]), accepted=accepted, draft=tried, notes=[note])

    def _length(self, context: Context, drafting_model: ModelRuntime | None) -> DraftLength:
        """The numbers of drafted tokens of one lane. Drafts without a model have no price."""
        most, schedule = self.num_assistant_tokens, self.num_assistant_tokens_schedule
        if schedule is None:
            schedule = "price" if most is None and not self.do_sample else "constant"
        most = most or MOST_DRAFTED
        if schedule == "constant":
            return Constant(most)
        if schedule != "price":
            return Heuristic(most)
        price = context.model.pass_price
        check = partial(price.check, cached=context.prefix.cache is not None)
        draft = 0.0 if drafting_model is None else drafting_model.pass_price.step / price.step
        return Priced(most, check, draft)

    def _verify(self, logits: Tensor, draft: Draft, rng: torch.Generator) -> tuple[int, int]:
        """The number of accepted draft tokens, and the token after them. logits f32 [D+1, V], processed."""
        if not self.do_sample:
            chosen = best(logits).tolist()
            accepted = shared_length(draft.tokens, chosen)
            return accepted, chosen[accepted]
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

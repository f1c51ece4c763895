"""Assisted (speculative) decoding: a drafter proposes tokens, the model verifies all of them in one pass.

Greedy output equals plain greedy decoding, token for token. Sampled output follows the model's own distribution exactly
(Leviathan et al. 2023, arXiv:2211.17192, algorithm 1): both distributions are taken after the processors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from genctl.decode.types import Choice, Context, Scores, Search, Space
from genctl.strategies.draft_models import Draft, Drafter

Schedule: TypeAlias = Literal["constant", "heuristic", "heuristic_transient"]


@dataclass(frozen=True)
class Assisted:
    """One row, several tokens per pass.

    `num_assistant_tokens` are drafted at a time. Both heuristic schedules add two after a draft that was accepted in
    full and subtract one after any other. Each prompt starts with `num_assistant_tokens` again, so that its output does
    not depend on the prompts before it. A model drafter stops at a token with a probability below
    `assistant_confidence_threshold`.
    """

    drafter: Drafter
    do_sample: bool = False
    num_assistant_tokens: int = 20
    num_assistant_tokens_schedule: Schedule = "constant"
    assistant_confidence_threshold: float = 0.4

    n: ClassVar[int] = 1
    rows: ClassVar[int] = 1
    length_penalty: ClassVar[float] = 1.0
    needs_hidden: ClassVar[bool] = False
    space: ClassVar[Space] = "logits"
    drafts: ClassVar[bool] = True
    independent: ClassVar[bool] = True
    reads_scores: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        return self.drafter.kind

    def search(self, scores: Scores, context: Context) -> Search:
        propose = self.drafter.begin(context, self.do_sample, self.assistant_confidence_threshold)
        row = torch.zeros(1, dtype=torch.long, device=scores.logits.device)
        count, draft = self.num_assistant_tokens, Draft([])
        while True:
            accepted, token = self._verify(scores.logits[0], draft, context.rng)
            written = row.new_tensor([*draft.tokens[:accepted], token])
            note = f"{accepted} of {len(draft.tokens)} drafts" if draft.tokens else ""
            if draft.tokens and self.num_assistant_tokens_schedule != "constant":
                count = count + 2 if accepted == len(draft.tokens) else max(1, count - 1)
            # the pass that checks a draft also writes one further token
            room = context.max_new_tokens - scores.rows.written - len(written) - 1
            # the check must use the rotary frequencies with which the accepted tokens are read later
            room = min(room, context.model.draft_room(scores.rows.tokens.shape[1] + len(written)))
            draft = Draft([])
            if room > 0 and not set(written.tolist()) & set(context.eos):
                draft = propose(torch.cat([scores.rows.tokens[0], written]), min(count, int(room)))
            tried = row.new_tensor(draft.tokens)[None, None] if draft.tokens else None
            scores = yield Choice(row, written[-1:], accepted=accepted, draft=tried, notes=[note])

    def _verify(self, logits: Tensor, draft: Draft, rng: torch.Generator) -> tuple[int, int]:
        """The number of accepted draft tokens, and the token after them. logits f32 [D+1, V], processed."""
        if not self.do_sample:
            best = logits.argmax(-1).tolist()
            accepted = next((i for i, token in enumerate(draft.tokens) if token != best[i]), len(draft.tokens))
            return accepted, best[accepted]
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

"""A strategy that writes given tokens and hands out the logits before each: a text is read as a run would write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from genctl.decode.types import Choice, Context, Scores, Search, Space

Observe: TypeAlias = Callable[[int, Tensor], None]  # index of a token, logits f32 [V] before it


@dataclass(frozen=True)
class Forced:
    """Write `given`, whatever the scores are (teacher forcing, Williams and Zipser 1989).

    With `drafted` above 0 the tokens come as drafts of that length whose last token is wrong, so that a pass reads
    several tokens and the cache takes one back, as in speculative decoding.
    """

    given: tuple[int, ...]
    observe: Observe
    drafted: int = 0

    kind: ClassVar[str] = "forced"
    space: ClassVar[Space] = "raw"
    rows: ClassVar[int] = 1
    length_penalty: ClassVar[float] = 1.0
    needs_hidden: ClassVar[bool] = False
    independent: ClassVar[bool] = True
    reads_scores: ClassVar[bool] = False

    @property
    def drafts(self) -> bool:
        return self.drafted > 0

    def search(self, scores: Scores, context: Context) -> Search:
        row = torch.zeros(1, dtype=torch.long, device=scores.raw.device)
        index, right = 0, 0  # `right` tokens of the draft are those of the text
        while True:
            for place in range(right + 1):
                self.observe(index + place, scores.raw[0, place])
            token, accepted = self.given[index + right], right
            index += right + 1
            draft = self._draft(index, int(scores.raw.shape[-1]), self._room(index, scores, context))
            right = max(len(draft) - 1, 0)
            tried = row.new_tensor(draft)[None, None] if draft else None
            scores = yield Choice(row, row.new_tensor([token]), accepted=accepted, draft=tried)

    def _room(self, index: int, scores: Scores, context: Context) -> int:
        """How many tokens may be on trial: the pass that checks them also writes one further."""
        if not self.drafted:
            return 0
        length = scores.rows.prompt_len + index
        return int(min(self.drafted, len(self.given) - index - 1, context.model.draft_room(length)))

    def _draft(self, index: int, vocabulary: int, room: int) -> list[int]:
        if room < 1:
            return []
        draft = list(self.given[index : index + room])
        draft[-1] = (draft[-1] + 1) % vocabulary
        return draft

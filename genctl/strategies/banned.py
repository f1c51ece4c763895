"""Phrase bans: when a banned phrase appears, backtrack to the token in which it begins.

That token is barred at this place, and another one is chosen. While a phrase may still begin in a token, the token is
on trial: it is fed as a draft, and not shown. The n-th new token is chosen with the n-th draw of the row, each time
that it is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from genctl.decode.processors import function_of
from genctl.decode.processors.bans import Bans
from genctl.decode.types import Choice, Context, RowsOfLane, Scores, Search, Traits
from genctl.errors import ModelError, UsageError, quote
from genctl.strategies.sample import Sample

if TYPE_CHECKING:
    from genctl.strategies.sampling import Sampler


@dataclass(frozen=True)
class Banned:
    """One row, greedy or sampled, without the phrases of its `Bans`."""

    do_sample: bool = False
    length_penalty: float = 1.0
    sampler: Sampler = "multinomial"

    n: ClassVar[int] = 1
    max_rows: ClassVar[int] = 1
    traits: ClassVar[Traits] = Traits(drafts=True, takes_back=True, independent=True, reads_scores=True)

    @property
    def kind(self) -> str:
        return Sample(self.do_sample).kind

    def search(self, scores: Scores, context: Context) -> Search:
        plain, bans = (
            Sample(self.do_sample, 1, self.length_penalty, self.sampler),
            function_of(context.processors, Bans),
        )
        if bans is None:
            raise UsageError("ban has no effect: the list of processors leaves it out", hint='add use = "ban" to it')
        rng, row = context.rng, torch.zeros(1, dtype=torch.long, device=scores.logits.device)
        trial, note = Trial(bans, scores.rows.texts[0].words.fork()), ""
        written: list[int] = []
        draws: list[torch.Tensor] = []  # the generator's state before each token on trial
        while True:
            while True:
                place = len(trial.tokens)
                draws[place:] = [rng.get_state()]
                lane = RowsOfLane(rng, (0,), 1, len(written) + place)
                token = int(plain.tokens(scores.logits[:1, place], [lane], None))
                before = [*written, *trial.tokens]
                if token in bans.after(before):
                    raise _nothing_left(bans, before)
                trial.push(token)
                ends = trial.settled < len(trial.tokens) and context.ends(trial.tokens)
                found = trial.find(whole=ends)
                if found is None:
                    break
                place, phrase = found
                bans.bar([*written, *trial.tokens[:place]], trial.tokens[place], phrase)
                note = f"took back {quote(phrase)}"
                trial.cut(place)
                rng.set_state(draws[place])
                if not context.rescore(place):
                    raise _nothing_left(bans, [*written, *trial.tokens])
            count = len(trial.tokens)
            settled = count if ends else trial.settled
            held = trial.tokens[settled:]
            if len(held) > context.model.draft_room(len(context.prefix.tokens[0]) + len(written) + settled):
                raise ModelError(
                    f"ban: {context.model.name} reads a text of this length in another way than its beginning, so that "
                    "nothing can be taken back here"
                )
            written += trial.accept(settled)
            del draws[:settled]
            if held:
                choice = Choice(row, None, accepted=settled, draft=row.new_tensor([[held]]), notes=[note])
            else:
                choice = Choice(row, row.new_tensor([written[-1]]), accepted=count - 1, notes=[note])
            note = "" if settled else note
            scores = yield choice


class Trial:
    """The tokens on trial and their text, after the settled ones."""

    def __init__(self, bans: Bans, words: Any) -> None:
        self.bans = bans
        self.tokens: list[int] = []
        self._words = [words]  # the detokenizer before them, and after each
        self._pieces: list[str] = []  # the characters that each completes
        self._tail = ""  # the last characters before them
        self._length = max(map(len, bans.searched)) - 1  # of the longest phrase without its last character

    def push(self, token: int) -> None:
        """Add a token."""
        words = self._words[-1].fork()
        self._pieces.append(words.push(token))
        self._words.append(words)
        self.tokens.append(token)

    def cut(self, place: int) -> None:
        """Remove all tokens from `place` on."""
        del self.tokens[place:], self._pieces[place:], self._words[place + 1 :]

    def accept(self, count: int) -> list[int]:
        """Settle the first tokens."""
        accepted, text = self.tokens[:count], self._tail + "".join(self._pieces[:count])
        self._tail = text[max(0, len(text) - self._length) :]
        del self.tokens[:count], self._pieces[:count], self._words[:count]
        return accepted

    def find(self, *, whole: bool) -> tuple[int, str] | None:
        """The index of the token in which the earliest phrase begins, and the phrase; None if there is none.

        `whole`: incomplete characters are part of the text, because it ends here.
        """
        text = self._text + (self._words[-1].rest() if whole else "")
        folded = self.bans.fold(text)
        places = ((folded.find(searched), -len(searched), phrase) for searched, phrase in self.bans.searched.items())
        at, _, phrase = min((place for place in places if place[0] >= 0), default=(-1, 0, ""))
        return None if at < 0 else (self._holder(self._unfolded(text, at)), phrase)

    @property
    def settled(self) -> int:
        """The number of tokens before the first in which a phrase may have begun."""
        text = self._text
        folded = self.bans.fold(text)
        for start in range(max(0, len(folded) - self._length), len(folded)):
            if self.bans.may_begin(folded[start:]):
                return self._holder(self._unfolded(text, start))
        return self._holder(len(text)) if self._words[-1].rest() else len(self.tokens)

    @property
    def _text(self) -> str:
        return self._tail + "".join(self._pieces)

    def _holder(self, at: int) -> int:
        """The first token after which the text, with its incomplete characters, reaches beyond character `at`."""
        end = len(self._tail)
        for place, piece in enumerate(self._pieces):
            end += len(piece)
            if end + len(self._words[place + 1].rest()) > at:
                return place
        return max(len(self.tokens) - 1, 0)

    def _unfolded(self, text: str, at: int) -> int:
        """The character of `text` that character `at` of its folded form comes from."""
        length = 0
        for place, character in enumerate(text):
            length += len(self.bans.fold(character))
            if length > at:
                return place
        return len(text)


def _nothing_left(bans: Bans, before: Sequence[int]) -> UsageError:
    phrases = dict.fromkeys(bans.after(before).values())
    named = " or ".join(map(quote, phrases))
    return UsageError(
        f"ban: after {len(before)} new tokens nothing may follow but what begins {named}",
        hint="relax what else bars or forces tokens there",
    )

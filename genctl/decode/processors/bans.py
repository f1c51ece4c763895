"""Banned texts: the mask of their tokens. `genctl/strategies/banned.py` takes back texts that no mask can prevent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.token_bytes import Spelling, spelling
from genctl.errors import UsageError

_BETWEEN = "\ufdd0"  # a Unicode noncharacter


class Bans:
    """history int64 [R, T], scores f32 [R, V] -> scores without the banned tokens.

    Tokens whose own text contains a phrase are banned everywhere, those passed to `bar` only after the tokens passed
    with them.
    """

    def __init__(self, phrases: Sequence[str], *, ignore_case: bool, whole: Tensor, prompt_len: int) -> None:
        self.phrases, self.ignore_case, self.prompt_len = tuple(dict.fromkeys(phrases)), ignore_case, prompt_len
        self.whole = whole  # bool [V]
        self._barred: dict[tuple[int, ...], dict[int, str]] = {}  # new tokens -> token -> its phrase

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        output = scores.masked_fill(self.whole, -torch.inf)
        if self._barred:
            for row, tokens in enumerate(history[:, self.prompt_len :].tolist()):
                output[row, [*self.after(tokens)]] = -torch.inf
        return output

    def bar(self, before: Sequence[int], token: int, phrase: str) -> None:
        """Bar a token with which a phrase began, where the new tokens so far are `before`."""
        self._barred.setdefault(tuple(before), {})[token] = phrase

    def after(self, before: Sequence[int]) -> dict[int, str]:
        """The tokens that are barred after the new tokens `before`, each with its phrase."""
        return self._barred.get(tuple(before), {})

    def fold(self, text: str) -> str:
        """The text in the form in which it is compared (case-folded with `ignore_case`)."""
        return text.casefold() if self.ignore_case else text

    @cached_property
    def searched(self) -> dict[str, str]:
        """Folded phrase -> phrase, the longest first."""
        return {self.fold(phrase): phrase for phrase in sorted(self.phrases, key=len, reverse=True)}

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.searched)

    def may_begin(self, text: str) -> bool:
        """Whether a folded phrase begins with `text` and is longer."""
        place = bisect_right(self._sorted, text)  # strings that begin with it sort directly after it
        return place < len(self._sorted) and self._sorted[place].startswith(text)


def ban(m: ProcessorContext, phrases: Sequence[str]) -> Bans | None:
    """The processor of `ban`."""
    if not phrases:
        return None
    if m.tokenizer is None:
        raise UsageError("ban: is about text, but the checkpoint has no tokenizer", hint="bad_words_ids bars ids")
    whole = torch.zeros(m.vocab_size, dtype=torch.bool)
    made = Bans(phrases, ignore_case=m.generation.ban_ignore_case, whole=whole, prompt_len=m.prompt_len)
    try:
        words = spelling(m.tokenizer, m.vocab_size, "ban")
    except UsageError:  # its tokens have no text of their own: phrases can only be found in the written text
        words = Spelling((), {})
    key = "texts", made.ignore_case
    if key not in words.memo:
        texts = [made.fold(piece.decode(errors="replace")) for piece in words.pieces]
        words.memo[key] = _BETWEEN.join(texts), [*accumulate(len(text) + 1 for text in texts)]
    joined, ends = words.memo[key]
    for phrase in made.searched:
        at = joined.find(phrase)
        while at >= 0:
            token = bisect_right(ends, at)
            whole[token] = True
            at = joined.find(phrase, ends[token])
    made.whole = whole.to(m.device)
    return made

"""Drafts by a model with other tokens (universal assisted decoding): text is what the two models share.

The row is decoded and encoded anew for the assistant, and the assistant's text for the model. Only the newest part
goes through text each time: it is laid over the end of what was there, by the longest run of tokens in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, ClassVar

from torch import Tensor

from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Context
from genctl.errors import ModelError
from genctl.strategies.draft_models import Draft, Drafting, Follower, shared

OPEN = "\ufffd"  # what a character that is not complete is decoded to
SLACK = 4  # tokens more than expected in which the pieces may meet


@dataclass(frozen=True)
class UniversalDrafter:
    """An assistant with another tokenizer writes ahead, its most probable tokens.

    `target_lookbehind` tokens of the row and `assistant_lookbehind` of the assistant's are encoded anew with what
    follows them, so that the pieces meet.
    """

    forward: ModelRuntime
    tokenizer: Any  # the assistant's
    target_tokenizer: Any  # the model's
    assistant_lookbehind: int = 10
    target_lookbehind: int = 10

    kind: ClassVar[str] = "assisted"

    def begin(self, context: Context, do_sample: bool, confidence: float) -> Drafting:
        if self.forward.is_encoder_decoder or context.model.is_encoder_decoder:
            raise ModelError("an assistant with another tokenizer needs two decoder-only models")
        return _Translating(self, context, confidence)


class _Translating:
    """The row in the assistant's tokens, and its drafts in the model's."""

    def __init__(self, drafter: UniversalDrafter, context: Context, confidence: float) -> None:
        self.drafter = drafter
        self.context = context
        self.confidence = confidence
        self.follower = Follower(drafter.forward, use_cache=context.prefix.cache is not None)
        self.ids: list[int] = []  # the row in the assistant's tokens, at the last call
        self.seen = 0  # of the row, at the last call
        self.eos = frozenset(drafter.forward.eos)

    def __call__(self, row: Tensor, count: int) -> Draft:
        drafter, follower = self.drafter, self.follower
        wanted, same = self._translate(row)
        if not wanted:
            return Draft([])
        same += shared(follower.ids[same:], wanted[same:])
        follower.rewind(min(same, len(wanted) - 1))
        logits = follower.read(wanted[len(follower.ids) :])
        drafted: list[int] = []
        ended = False
        while not ended:
            token = int(logits.argmax())
            ended = token in self.eos
            if not ended:
                drafted.append(token)
            if len(drafted) == count or float(logits.softmax(-1)[token]) < self.confidence:
                break
            if not ended:
                logits = follower.read([token])
        self.ids, self.seen = wanted, len(row)
        recent = wanted[max(0, len(wanted) - drafter.assistant_lookbehind) :]
        made = _encode(drafter.target_tokenizer, _text(drafter.tokenizer, recent + drafted))
        known = len(_encode(drafter.target_tokenizer, _text(drafter.tokenizer, recent)))
        before = row[max(0, len(row) - known - SLACK) :].tolist()
        meeting = _meet(before, made, known)
        # what the row holds stays, even where the assistant's text would be cut into other tokens
        tokens = [] if meeting is None else made[meeting[1] + len(before) - meeting[0] :]
        if ended and self.context.eos:
            tokens.append(self.context.eos[0])
        size = self.context.prefix.logits.shape[-1]
        usable = next((place for place, token in enumerate(tokens) if token >= size), len(tokens))
        return Draft(tokens[: min(count, usable)])

    def _translate(self, row: Tensor) -> tuple[list[int], int]:
        """The row in the assistant's tokens, and how many of them are certainly those of the last call."""
        drafter = self.drafter
        start = max(0, self.seen - drafter.target_lookbehind)
        if start:
            fresh = self._encoded(row[start:])
            known = len(self._encoded(row[start : self.seen]))
            same = max(0, len(self.ids) - known - SLACK)
            meeting = _meet(self.ids[same:], fresh, known)
            if meeting is not None:
                return self.ids[: same + meeting[0]] + fresh[meeting[1] :], same
        return self._encoded(row, special=True), 0

    def _encoded(self, row: Tensor, *, special: bool = False) -> list[int]:
        text = _text(self.drafter.target_tokenizer, row.tolist())
        return _encode(self.drafter.tokenizer, text, special=special)


def _meet(before: Sequence[int], made: Sequence[int], known: int) -> tuple[int, int] | None:
    """Where `made`, whose first tokens (about `known`) say the end of `before` again, goes on: a place in each.

    The longest run that ends where `before` does counts; without one, the longest run of all. None without any.
    """
    made = made[:known]
    best = (0, 0)
    for end in range(len(made), 0, -1):
        run = shared(before[::-1], made[end - 1 :: -1])
        best = max(best, (run, end), key=lambda found: found[0])
    run, end = best
    if run > 1 or (run and end == len(made)):  # a single token may stand there by chance
        return len(before), end
    found = SequenceMatcher(None, before, made, autojunk=False).find_longest_match(0, len(before), 0, len(made))
    return (found.a + found.size, found.b + found.size) if found.size else None


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text.rstrip(OPEN)


def _encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

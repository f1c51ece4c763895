"""Drafts by a model with other tokens (universal assisted decoding): text is what the two models share.

The row is decoded and encoded anew for the assistant, and the assistant's text for the model. Only the newest part goes
through text each time: it is laid over what was there by the longest run of tokens that both have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, ClassVar

from torch import Tensor

from genctl.decode.forward import Forward
from genctl.decode.types import Context
from genctl.errors import ModelError
from genctl.strategies.drafting import Draft, Drafting, Follower, shared

OPEN = "\ufffd"  # what a character that is not complete is decoded to


@dataclass(frozen=True)
class UniversalDrafter:
    """An assistant with another tokenizer writes ahead, its most probable tokens.

    `target_lookbehind` tokens of the row and `assistant_lookbehind` of the assistant's are encoded anew with what
    follows them, so that the pieces meet.
    """

    forward: Forward
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
        self.ids: list[int] = []  # the assistant's tokens of the row and of the last draft
        self.seen = 0  # of the row, at the last call
        eos = drafter.forward.model.generation_config.eos_token_id
        self.eos = frozenset([eos] if isinstance(eos, int) else eos or [])

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
        self.ids, self.seen = wanted + drafted, len(row)
        recent = wanted[max(0, len(wanted) - drafter.assistant_lookbehind) :]
        made = _encode(drafter.target_tokenizer, _text(drafter.tokenizer, recent + drafted))
        tokens = _continuation(row[max(0, len(row) - len(made)) :].tolist(), made)
        if ended and self.context.eos:
            tokens.append(self.context.eos[0])
        size = self.context.prefix.logits.shape[-1]
        usable = next((place for place, token in enumerate(tokens) if token >= size), len(tokens))
        return Draft(tokens[: min(count, usable)])

    def _translate(self, row: Tensor) -> tuple[list[int], int]:
        """The row in the assistant's tokens, and how many of them are certainly those of the last call."""
        drafter = self.drafter
        newest = row[max(0, self.seen - drafter.target_lookbehind) :] if self.seen else row
        fresh = _encode(
            drafter.tokenizer, _text(drafter.target_tokenizer, newest.tolist()), special=len(newest) == len(row)
        )
        if len(newest) == len(row):
            return fresh, 0
        start = max(0, len(self.ids) - len(fresh) - drafter.target_lookbehind)
        match = _overlap(self.ids[start:], fresh)
        if match is None:  # nothing in common: everything is encoded anew
            return _encode(drafter.tokenizer, _text(drafter.target_tokenizer, row.tolist()), special=True), 0
        there, here, _ = match
        return self.ids[: start + there] + fresh[here:], start


def _continuation(before: Sequence[int], made: list[int]) -> list[int]:
    """What `made` adds to `before`, a row's newest tokens, which stay as they are even where `made` differs."""
    match = _overlap(before, made)
    if match is None:
        return []
    there, here, size = match
    return made[here + size + len(before) - (there + size) :]


def _overlap(one: Sequence[int], other: Sequence[int]) -> tuple[int, int, int] | None:
    """The longest run that both have: where it begins in each, and its length."""
    found = SequenceMatcher(None, one, other, autojunk=False).find_longest_match(0, len(one), 0, len(other))
    return (found.a, found.b, found.size) if found.size else None


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text.rstrip(OPEN)


def _encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

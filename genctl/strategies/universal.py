"""Universal assisted decoding: drafts by a model with another tokenizer, translated through text.

The row is decoded and encoded again for the assistant, and the assistant's text for the model. Only the newest part is
translated each time and aligned with the end of the known part by the longest common run of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, ClassVar

from genctl.decode.read_along import ReadAlong
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Context, Draft
from genctl.errors import ModelError
from genctl.events import shared_length
from genctl.strategies.draft_models import DraftWriter, Draw

OPEN = "\ufffd"  # the decoding of an incomplete character
SLACK = 4  # tokens beyond the expected overlap to search for a match


@dataclass(frozen=True)
class UniversalDrafter:
    """An assistant with another tokenizer drafts its most probable tokens.

    `target_lookbehind` tokens of the row and `assistant_lookbehind` of the assistant's are encoded again with what
    follows them, so that the parts can be aligned.
    """

    forward: ModelRuntime
    tokenizer: Any  # the assistant's
    target_tokenizer: Any  # the model's
    assistant_lookbehind: int = 10
    target_lookbehind: int = 10

    kind: ClassVar[str] = "assisted"

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        if self.forward.is_encoder_decoder or context.model.is_encoder_decoder:
            raise ModelError("an assistant with another tokenizer needs two decoder-only models")
        return _TranslatingDraftWriter(self, context, confidence)


class _TranslatingDraftWriter:
    """The row in the assistant's tokens, and its drafts in the model's."""

    def __init__(self, drafter: UniversalDrafter, context: Context, confidence: float) -> None:
        self.drafter = drafter
        self.context = context
        self.confidence = confidence
        self.follower = ReadAlong(drafter.forward, use_cache=context.prefix.cache is not None, cuts=True)
        self.ids: list[int] = []  # the row in the assistant's tokens, at the last call
        self.seen = 0  # of the row, at the last call
        self.eos = frozenset(drafter.forward.eos)

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        drafter, follower = self.drafter, self.follower
        ids, same = self._translate(text)
        if not ids:
            return Draft([])
        read = follower.rows[0] if follower.rows else ()
        same += shared_length(read[same:], ids[same:])
        follower.cut(min(same, len(ids) - 1))
        logits = follower([ids])[0]
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
                logits = follower([[*ids, *drafted]])[0]
        self.ids, self.seen = ids, len(text)
        recent = ids[max(0, len(ids) - drafter.assistant_lookbehind) :]
        encoded = _encode(drafter.target_tokenizer, _text(drafter.tokenizer, recent + drafted))
        known = len(_encode(drafter.target_tokenizer, _text(drafter.tokenizer, recent)))
        before = text[max(0, len(text) - known - SLACK) :]
        meeting = _meet(before, encoded, known)
        # the row's tokens stay, even if the text after them would be tokenised differently
        tokens = [] if meeting is None else encoded[meeting[1] + len(before) - meeting[0] :]
        if ended and self.context.eos:
            tokens.append(self.context.eos[0])
        size = self.context.prefix.logits.shape[-1]
        usable = next((place for place, token in enumerate(tokens) if token >= size), len(tokens))
        return Draft(tokens[: min(count, usable)])

    def _translate(self, row: Sequence[int]) -> tuple[list[int], int]:
        """The row in the assistant's tokens, and how many of them are unchanged since the last call."""
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

    def _encoded(self, row: Sequence[int], *, special: bool = False) -> list[int]:
        text = _text(self.drafter.target_tokenizer, row)
        return _encode(self.drafter.tokenizer, text, special=special)


def _meet(before: Sequence[int], again: Sequence[int], known: int) -> tuple[int, int] | None:
    """Align `again`, whose first tokens (about `known`) repeat the end of `before`: the end of the match in each.

    A run that ends where `before` ends is preferred; else the longest common run. None if nothing matches.
    """
    again = again[:known]
    best = (0, 0)
    for end in range(len(again), 0, -1):
        run = shared_length(before[::-1], again[end - 1 :: -1])
        best = max(best, (run, end), key=lambda match: match[0])
    run, end = best
    if run > 1 or (run and end == len(again)):  # a single token may match by chance
        return len(before), end
    match = SequenceMatcher(None, before, again, autojunk=False).find_longest_match(0, len(before), 0, len(again))
    return (match.a + match.size, match.b + match.size) if match.size else None


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text.rstrip(OPEN)


def _encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

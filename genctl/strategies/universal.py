"""Universal assisted decoding: an assistant with another tokenizer drafts, and tokens are translated through text.

Only the end of the row is encoded again for the assistant, and only the end of the assistant's text for the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from genctl.decode.read_along import ReadAlong
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Context, Draft
from genctl.errors import ModelError
from genctl.events import shared_length
from genctl.strategies.drafters import DraftWriter, Draw, ModelDraftWriter

OPEN = "\ufffd"  # the decoding of an incomplete character
OPEN_TOKENS = 4  # most tokens of an incomplete character


@dataclass(frozen=True)
class UniversalDrafter:
    """An assistant with another tokenizer drafts its most probable tokens.

    The last `target_lookbehind` tokens of the row and `assistant_lookbehind` of the assistant's are encoded again with
    the text after them, because tokens depend on the text before them.
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


class _TranslatingDraftWriter(ModelDraftWriter):
    """Reads the row in the assistant's tokens, and returns the assistant's drafts in the model's."""

    def __init__(self, drafter: UniversalDrafter, context: Context, confidence: float) -> None:
        follower = ReadAlong(drafter.forward, use_cache=context.prefix.cache is not None, cuts=True)
        super().__init__(follower, replace(context, eos=tuple(drafter.forward.eos)), None, confidence)
        self.drafter, self.target = drafter, context
        self.ids: list[int] = []  # the row in the assistant's tokens, at the last call
        self.seen = 0  # length of the row at the last call

    def __call__(self, text: Sequence[int], count: int) -> Draft:
        drafter, model = self.drafter, self.drafter.target_tokenizer
        ids = self._translate(text)
        self.ids, self.seen = ids, len(text)
        if not ids:
            return Draft([])
        self.length, self.drafted = 0, [*self.follower.rows[0]] if self.follower.rows else []
        drafted = super().__call__(ids, count).tokens
        ended = drafted[-1] in self.context.eos
        recent = ids[-drafter.assistant_lookbehind :] if drafter.assistant_lookbehind else []
        known = len(_encode(model, _text(drafter.tokenizer, recent)))
        encoded = _encode(model, _text(drafter.tokenizer, recent + drafted[: len(drafted) - ended]))
        # the assistant's tokens lack an incomplete character at the end of the row, which the row's tokens have
        opened = range(OPEN_TOKENS)
        begun = next((n for n in opened if [*text[-1 - n :]] == encoded[max(0, known - 1) : known + n]), 0)
        tokens = encoded[known + begun :]
        if ended and self.target.eos:
            tokens.append(self.target.eos[0])
        size = self.target.prefix.logits.shape[-1]
        usable = next((place for place, token in enumerate(tokens) if token >= size), len(tokens))
        return Draft(tokens[: min(count, usable)])

    def _scores(self, text: Sequence[int], tokens: list[int], logits: Tensor) -> Tensor:
        return logits[None]  # the processors are for the model's tokens

    def _translate(self, row: Sequence[int]) -> list[int]:
        """The row in the assistant's tokens: those of the last call, and the tokens since.

        `known` encodes the end of the row at the last call, and `again` the same end with the text since. They join
        where `again` has the tokens of `known`, and `known` those of the last call; else the whole row is encoded.
        """
        ids, start = self.ids, max(0, self.seen - self.drafter.target_lookbehind)
        if start:
            known, again = self._encoded(row[start : self.seen]), self._encoded(row[start:])
            same = shared_length(known, again)
            if same + shared_length(known[::-1], ids[::-1]) > len(known):
                return [*ids[: len(ids) - len(known) + same], *again[same:]]
        return self._encoded(row, special=True)

    def _encoded(self, row: Sequence[int], *, special: bool = False) -> list[int]:
        return _encode(self.drafter.tokenizer, _text(self.drafter.target_tokenizer, row), special=special)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text.rstrip(OPEN)


def _encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

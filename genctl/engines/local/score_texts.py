"""Texts to score as token ids, with the place of a text among them, its scored tokens and its bytes.

A causal model has no score for the first token that it reads. If the tokenizer puts BOS in front, that is BOS, and
every token of the text is scored; otherwise the text's own first token is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from genctl.errors import InputError, ModelError
from genctl.models import text as texts

if TYPE_CHECKING:
    from genctl.models.hub import LoadedModel


@dataclass(frozen=True)
class EncodedText:
    """One text as token ids. `ids[begin:]` are its own tokens, of which `ids[first:]` are scored."""

    text: str  # the text of `ids[begin:]`
    ids: tuple[int, ...]  # context or decoder start first
    begin: int
    first: int  # at least 1
    bytes: int  # UTF-8 bytes of the scored tokens' characters
    source: tuple[int, ...] | None = None  # the encoder's input


class TextReader:
    """Encodes texts for one checkpoint. Raises ModelError for a checkpoint that cannot score them."""

    def __init__(self, loaded: LoadedModel, *, eos: int | None, start: int | None, add_eos: bool) -> None:
        if loaded.tokenizer is None:
            raise ModelError(f"{loaded.name} has no tokenizer, so there is no text to score")
        self.tokenizer: Any = loaded.tokenizer
        self.is_encoder_decoder = loaded.is_encoder_decoder
        self.vocab_size = loaded.vocab_size
        own = self.tokenizer.eos_token_id
        self.end = (own if own is not None else eos) if add_eos else None
        if add_eos and self.end is None:
            raise ModelError(f"{loaded.name} names no EOS, so --add-eos has nothing to add")
        if self.is_encoder_decoder and start is None:
            raise ModelError(f"{loaded.name} names no decoder_start_token_id, so its decoder cannot begin")
        self.start = start
        self.before, self.after = self._frame()

    def plain(self, text: str) -> EncodedText:
        """A text by itself, for a causal model. Raises InputError if none of its tokens has a score."""
        ids = self._encode(text)
        if self.before:
            begin, first, size = 0, len(self.before), _size(text)
        else:
            begin, first, size = 0, 1, self._size_after_first(text, ids[0])
        ids = self._ended(ids)
        if len(ids) <= first:
            raise InputError(
                "the text is a single token, and a causal model has no score for the first one; "
                "give what comes before it with --context"
            )
        return self._encoded(text, ids, begin, first, size)

    def after_context(self, context: str, text: str) -> EncodedText:
        """A text that continues `context` directly: all of its tokens are scored.

        The context has the same tokens as alone. The text has the tokens that follow them when both are tokenised
        together; if a token crosses the boundary, the text is tokenised alone.
        """
        head = self.context(context)
        joint = self._encode(context + text)
        rest = joint[len(head) :]
        if joint[: len(head)] != head or len(rest) <= len(self.after):
            rest = [*texts.continuation(self.tokenizer, text), *self.after]
        ids = self._ended([*head, *rest])
        return self._encoded(text, ids, len(head), len(head), _size(text))

    def context(self, context: str) -> list[int]:
        """The ids of a context. Raises InputError if it is empty and there is no BOS."""
        if not context:
            if not self.before:
                raise InputError("there is no context, and this tokenizer puts no BOS in front to begin with")
            return list(self.before)
        ids = self._encode(context)
        return ids[: len(ids) - len(self.after)]

    def target(self, source: str, target: str) -> EncodedText:
        """A target for an encoder-decoder, after the decoder start token, which has no score."""
        assert self.start is not None
        head = self.source(source)
        ids = self._ended(self._encode_target(target))
        return self._encoded(target, [self.start, *ids], 1, 1, _size(target), head)

    def source(self, source: str) -> tuple[int, ...]:
        """The encoder's input. Raises InputError."""
        ids = self._encode(source)
        texts.check_ids(ids, self.vocab_size)
        return tuple(ids)

    def _encoded(
        self, text: str, ids: Sequence[int], begin: int, first: int, size: int, source: tuple[int, ...] | None = None
    ) -> EncodedText:
        texts.check_ids(ids, self.vocab_size)
        return EncodedText(text, tuple(ids), begin, first, size, source)

    def _encode(self, text: str) -> list[int]:
        return texts.encode(self.tokenizer, text, add_special_tokens=True)

    def _encode_target(self, text: str) -> list[int]:
        texts.encode(self.tokenizer, text, add_special_tokens=True)  # raises InputError for an invalid text
        ids = list(self.tokenizer(text_target=text, verbose=False)["input_ids"])
        if not ids:
            raise InputError("the target tokenises to nothing")
        return ids

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if self.end is None or ids[-1:] == [self.end] else [*ids, self.end]

    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after every text."""
        bare, framed = texts.encode(self.tokenizer, "a", add_special_tokens=False), self._encode("a")
        for at in range(len(framed) - len(bare) + 1):
            if framed[at : at + len(bare)] == bare:
                return framed[:at], framed[at + len(bare) :]
        return [], []

    def _size_after_first(self, text: str, first: int) -> int:
        """Bytes of UTF-8 after the first token; a character shared with the second one is counted."""
        if getattr(self.tokenizer, "is_fast", False):
            offsets = self.tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
            at = min(offsets[0][1], offsets[1][0]) if len(offsets) > 1 else offsets[0][1]
            return _size(text[at:])
        return max(_size(text) - _size(texts.decode(self.tokenizer, [first])), 0)


def _size(text: str) -> int:
    return len(text.encode("utf-8"))

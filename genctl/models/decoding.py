"""How a tokenizer decodes: whether its text can be made piece by piece, and the text of its single tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from genctl.decode.processors.token_bytes import bytes_of, is_byte, is_byte_level, special_of, steps_of
from genctl.errors import ModelError
from genctl.models.libraries import is_library_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DecodeMode: TypeAlias = Literal["bytes", "pieces", "whole"]


class DecodingVocabulary:
    """State that detokenizers of one tokenizer share: how it decodes, and the text of single tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip: bool) -> None:
        self.tokenizer, self.skip = tokenizer, skip
        self.clean = cleans(tokenizer)
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        self.mode, self.fallback = _decode_mode(tokenizer)
        self.special = frozenset(tokenizer.all_special_ids) if self.backend is None else special_of(self.backend)
        self.skipped = self.special if skip else frozenset()
        # of one id; called for each token of a text
        self.bytes_of, self.piece = cache(self._bytes_of), cache(self._piece)
        # whether it takes part in decoding: decode() leaves out skipped ids and those without a token
        self.writes = cache(lambda id: id not in self.skipped and self.token(id) is not None)
        self.characters, self.alone = cache(self._characters), cache(lambda id: self.raw([id]))
        self._anchor: int | None = None

    def raw(self, ids: list[int]) -> str:
        """decode() without the clean-up of spaces."""
        return decoded(self.tokenizer, ids, skip_special_tokens=self.skip, clean=False)

    def lead(self, prompt: Sequence[int]) -> list[int]:
        """The end of a prompt that decides what text new tokens add: nothing before it changes that."""
        if self.mode == "whole":
            return list(prompt)
        least = 1
        for place in range(len(prompt) - 1, -1, -1):
            if len(prompt) - place >= least and self._begins(prompt[place]):
                lead = list(prompt[place:])
                if not self.clean or safe_cut(self.raw(lead), 0):
                    return lead
                least = 2 * len(lead)
        return list(prompt)

    def _begins(self, id: int) -> bool:
        """Whether the text from this id on does not depend on what is before it, but for a blank at its beginning."""
        if not self.writes(id):
            return False
        if self.mode == "bytes":
            return bool(self.bytes_of(id)) and not 0x80 <= self.bytes_of(id)[0] < 0xC0
        return not self.is_byte(id)

    def token(self, id: int) -> str | None:
        if self.backend is not None:
            return cast("str | None", self.backend.id_to_token(id))
        return cast("str | None", self.tokenizer.convert_ids_to_tokens(id))

    def _bytes_of(self, id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary; b"" for an id that it lacks."""
        literal = getattr(self.tokenizer, "literal", {})
        return literal[id].encode() if id in literal else bytes_of(self.token(id) or "")

    def _characters(self, id: int) -> str | None:
        """What a token of a byte-level vocabulary adds between characters; None if it leaves one incomplete."""
        content = self.bytes_of(id) if self.writes(id) else b""
        text, read = codecs.utf_8_decode(content, "replace", False)
        return text if read == len(content) else None

    def is_byte(self, id: int) -> bool:
        """Whether the token is one byte (<0xE2>) of a byte-fallback vocabulary."""
        return self.fallback and is_byte(self.token(id))

    def _piece(self, id: int) -> str:
        """The text of one token alone (`Detokenizer.piece`)."""
        token = self.token(id)
        if token is None:
            return f"<{id}>"
        if id in self.special or self.is_byte(id):
            return token
        if self.mode == "bytes":
            return "".join(
                f"<0x{ord(char) - 0xDC00:02X}>" if 0xDC80 <= ord(char) <= 0xDCFF else char
                for char in self.bytes_of(id).decode("utf-8", errors="surrogateescape")
            )
        if self._anchor is None:
            ids = range(len(self.tokenizer))
            plain = (
                one for one in ids if one not in self.special and not self.is_byte(one) and self.raw([one]).strip()
            )
            self._anchor = next(plain, id)
        before = self.raw([self._anchor])
        both = self.raw([self._anchor, id])
        return both[len(before) :] if both.startswith(before) else self.raw([id])


@lru_cache(maxsize=8)  # tokenizers are equal only to themselves, and a process has only a few
def vocabulary_of(tokenizer: PreTrainedTokenizerBase, skip: bool) -> DecodingVocabulary:
    return DecodingVocabulary(tokenizer, skip)


def _decode_mode(tokenizer: PreTrainedTokenizerBase) -> tuple[DecodeMode, bool]:
    """How text can be decoded piece by piece, and whether runs of byte tokens must stay together."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ("pieces", True) if hasattr(tokenizer, "sp_model") else ("whole", False)
    steps = steps_of(backend)
    if is_byte_level(steps):
        return "bytes", False
    fused = False
    for step in steps:
        if step["type"] == "Strip":
            if step["stop"] or not fused:
                return "whole", False
        elif step["type"] == "Fuse":
            fused = True
        elif step["type"] not in ("Replace", "ByteFallback", "Metaspace", "WordPiece", "BPEDecoder") or fused:
            return "whole", False
    return "pieces", any(step["type"] == "ByteFallback" for step in steps)


def cleans(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether decode() removes spaces before punctuation. transformers never does so for BPE unless forced to."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return backend is None or type(backend.model).__name__ != "BPE" or bool(getattr(tokenizer, forced, False))


def decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, skip_special_tokens: bool, clean: bool) -> str:
    try:
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=clean))
    except BaseException as error:
        if is_library_error(error):
            raise ModelError(f"the tokenizer cannot decode its own ids: {type(error).__name__}") from error
        raise


def safe_cut(text: str, start: int) -> int:
    """The last place, from `start` on, at which the text can be cleaned in two parts; 0 if there is none.

    The clean-up only removes spaces around certain texts (" ." " ' " " n't" " 's" …). A cut before a space is safe if
    the text before it cannot be the inside of such a pattern.
    """
    for at in range(len(text) - 1, max(start - 1, 0), -1):
        if text[at] == " " and (text[at - 1] not in " 'nvr" or (at > 1 and text[at - 2].isalnum())):
            return at
    return 0

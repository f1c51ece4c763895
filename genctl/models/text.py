"""Ids to text, whole characters only; and text to ids.

The reference is the tokenizer's decode() of the whole sequence. A `Detokenizer` produces the same text piece by piece:
its output so far is always a prefix, and it holds back only what later tokens can still change.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from genctl.errors import InputError, ModelError
from genctl.models.library_errors import without_panic_reports

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from genctl.models.hub import LoadedModel

Way: TypeAlias = Literal["bytes", "pieces", "whole"]


def encode_prompt(loaded: LoadedModel, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The ids of a prompt. Raises InputError if it has none, or one that the model cannot read."""
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.name} has no tokenizer: give prompt_ids instead of text")
    ids = encode(loaded.tokenizer, text, add_special_tokens=add_special_tokens)
    check_ids(ids, loaded.vocab_size)
    return ids


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text, at least one. Raises InputError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"the prompt is not valid Unicode: a lone surrogate at character {error.start}") from error
    try:
        with without_panic_reports():
            ids = list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    except BaseException as error:
        if _is_tokenizer_error(error):
            raise InputError(f"the tokenizer cannot read the prompt: {type(error).__name__}: {error}") from error
        raise
    if not ids:
        raise InputError("the prompt tokenises to nothing")
    return ids


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises InputError for an id that the model's embedding does not have."""
    for place, id in enumerate(ids, 1):
        if not 0 <= id < vocab_size:
            raise InputError(f"token {place} of the prompt has id {id}, but the model's ids are 0 to {vocab_size - 1}")


def decode(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    """The text of a record: special tokens left out, undecodable bytes as U+FFFD."""
    return _decode(tokenizer, list(ids), skip_special_tokens=True, clean=_cleans(tokenizer))


class Detokenizer:
    """Text from ids that come one by one.

    The results of `push` and the last one of `flush` add up to decode(ids). `push` has constant amortised cost.
    Byte-level vocabularies hold back at most three bytes. Byte-fallback ones hold back the current run of byte tokens,
    since one bad byte changes the text of the whole run. Vocabularies whose decoder can change any earlier text (rare)
    hold back everything.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = _vocabulary(tokenizer, skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # for the way "bytes"
        self._context: list[int] = []  # for the way "pieces": the id before `_pending`
        self._pending: list[int] = []
        self._held = ""  # decoded, but the clean-up of spaces may still change it
        self._looked = 0  # characters of `_held` that were searched for a place to cut

    def push(self, id: int) -> str:
        """The characters that this token completes; "" while one is incomplete."""
        return self._clean(self._raw(id), final=False)

    def flush(self) -> str:
        """The rest. An incomplete character is U+FFFD, as in decode()."""
        if self.vocabulary.way == "bytes":
            text = self._utf8.decode(b"", final=True)
            self._utf8.reset()
        else:
            text = self._settle()
        return self._clean(text, final=True)

    def fork(self) -> Detokenizer:
        """A second detokenizer in the same state."""
        twin = copy.copy(self)
        twin._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        twin._utf8.setstate(self._utf8.getstate())
        twin._pending, twin._context = self._pending.copy(), self._context.copy()
        return twin

    def decode(self, ids: Iterable[int]) -> str:
        """The whole text at once."""
        vocabulary = self.vocabulary
        return _decode(self.tokenizer, list(ids), skip_special_tokens=vocabulary.skip, clean=vocabulary.clean)

    def piece(self, id: int) -> str:
        """The text of one token alone, special tokens included; incomplete characters as bytes: <0xE2>."""
        return self.vocabulary.piece(id)

    def _raw(self, id: int) -> str:
        vocabulary = self.vocabulary
        if id in vocabulary.skipped:
            return ""
        if vocabulary.way == "bytes":
            return self._utf8.decode(vocabulary.bytes_of(id))
        self._pending.append(id)
        if vocabulary.way == "whole" or vocabulary.is_byte(id):
            return ""
        return self._settle()

    def _settle(self) -> str:
        """Decode the pending ids, with the id before them, because decoders treat the first id differently."""
        if not self._pending:
            return ""
        before = self.vocabulary.alone(self._context[0]) if self._context else ""
        text = self.vocabulary.raw(self._context + self._pending)[len(before) :]
        self._context, self._pending = self._pending[-1:], []
        return text

    def _clean(self, text: str, *, final: bool) -> str:
        if not self.vocabulary.clean:
            return text
        self._held += text
        cut = len(self._held) if final else _safe_cut(self._held, self._looked)
        if not cut:
            self._looked = len(self._held)
            return ""
        ready, self._held = self._held[:cut], self._held[cut:]
        self._looked = len(self._held)
        return str(self.tokenizer.clean_up_tokenization(ready))


class IdDetokenizer:
    """The detokenizer without a tokenizer: sequences have no text, and a token is shown as its id, <17>."""

    def push(self, id: int) -> str:
        """The id, for display; it is not part of the text."""
        return self.piece(id)

    def flush(self) -> str:
        """Nothing: there is no text."""
        return ""

    def fork(self) -> IdDetokenizer:
        """Itself: there is no state."""
        return self

    def decode(self, ids: Iterable[int]) -> str:
        """No text."""
        return ""

    def piece(self, id: int) -> str:
        """The id, as a Detokenizer shows an id that its tokenizer lacks."""
        return f"<{id}>"


Words: TypeAlias = "Detokenizer | IdDetokenizer"


def detokenizer(tokenizer: PreTrainedTokenizerBase | None) -> Words:
    """A new detokenizer for a tokenizer, or for none."""
    return IdDetokenizer() if tokenizer is None else Detokenizer(tokenizer)


class _Vocabulary:
    """State that detokenizers of one tokenizer share: the way it decodes, and the text of single tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip: bool) -> None:
        self.tokenizer, self.skip = tokenizer, skip
        self.clean = _cleans(tokenizer)
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        self.way, self.fallback = _way(tokenizer)
        special = set(tokenizer.all_special_ids)
        if self.backend is not None:
            added = self.backend.get_added_tokens_decoder()
            special = {id for id, token in added.items() if token.special}
        self.special = frozenset(special)
        self.skipped = self.special if skip else frozenset()
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str] = {}
        self._alone: dict[int, str] = {}
        self._anchor: int | None = None

    def raw(self, ids: list[int]) -> str:
        """decode() without the clean-up of spaces."""
        return _decode(self.tokenizer, ids, skip_special_tokens=self.skip, clean=False)

    def alone(self, id: int) -> str:
        """`raw` of one token."""
        text = self._alone.get(id)
        if text is None:
            text = self._alone[id] = self.raw([id])
        return text

    def token(self, id: int) -> str | None:
        if self.backend is not None:
            return cast("str | None", self.backend.id_to_token(id))
        return cast("str | None", self.tokenizer.convert_ids_to_tokens(id))

    def bytes_of(self, id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary; b"" for an id that it lacks."""
        content = self._bytes.get(id)
        if content is None:
            from genctl.decode.processors.byte_level import bytes_of

            content = self._bytes[id] = bytes_of(self.token(id) or "")
        return content

    def is_byte(self, id: int) -> bool:
        """Whether the token is one byte (<0xE2>) of a byte-fallback vocabulary."""
        return self.fallback and _byte_name(self.token(id))

    def piece(self, id: int) -> str:
        piece = self._pieces.get(id)
        if piece is None:
            piece = self._pieces[id] = self._piece(id)
        return piece

    def _piece(self, id: int) -> str:
        token = self.token(id)
        if token is None:
            return f"<{id}>"
        if id in self.special or self.is_byte(id):
            return token
        if self.way == "bytes":
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


_SHARED: dict[tuple[int, bool], tuple[Any, _Vocabulary]] = {}


def _vocabulary(tokenizer: PreTrainedTokenizerBase, skip: bool) -> _Vocabulary:
    # Keyed by identity; a process has only a few tokenizers.
    key = (id(tokenizer), skip)
    if key not in _SHARED or _SHARED[key][0] is not tokenizer:
        while len(_SHARED) >= 8:
            _SHARED.pop(next(iter(_SHARED)))
        _SHARED[key] = tokenizer, _Vocabulary(tokenizer, skip)
    return _SHARED[key][1]


def _way(tokenizer: PreTrainedTokenizerBase) -> tuple[Way, bool]:
    """How text can be decoded piece by piece, and whether runs of byte tokens must stay together."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ("pieces", True) if hasattr(tokenizer, "sp_model") else ("whole", False)
    from genctl.decode.processors.byte_level import decoder_of

    decoder = decoder_of(backend)
    if decoder is None:
        return "pieces", False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
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
    return "pieces", "ByteFallback" in kinds


def _cleans(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether decode() removes spaces before punctuation. transformers never does so for BPE unless forced to."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return backend is None or type(backend.model).__name__ != "BPE" or bool(getattr(tokenizer, forced, False))


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, skip_special_tokens: bool, clean: bool) -> str:
    try:
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=clean))
    except BaseException as error:
        if _is_tokenizer_error(error):
            raise ModelError(f"the tokenizer cannot decode its own ids: {type(error).__name__}") from error
        raise


def _is_tokenizer_error(error: BaseException) -> bool:
    """Whether an error is the tokenizer's: an Exception, or a Rust panic, which is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _safe_cut(text: str, start: int) -> int:
    """The last place, from `start` on, at which the text can be cleaned in two parts; 0 if there is none.

    The clean-up only removes spaces around certain texts (" ." " ' " " n't" " 's" …). A cut before a space is safe if
    the text before it cannot be the inside of such a pattern.
    """
    for at in range(len(text) - 1, max(start - 1, 0), -1):
        if text[at] == " " and (text[at - 1] not in " 'nvr" or (at > 1 and text[at - 2].isalnum())):
            return at
    return 0


def _byte_name(token: str | None) -> bool:
    return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")

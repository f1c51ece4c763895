"""Ids to text, whole characters only; and text to ids.

The reference is the tokenizer's decode() of the whole sequence, prompt included: the text of new tokens is what
decode(prompt + new) adds to decode(prompt). Many decoders drop a blank at the beginning of a sequence, so new tokens
decoded alone lack the blank after the prompt. A `Detokenizer` produces the same text piece by piece: its output so far
is always a prefix, and it holds back only what later tokens can still change.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from genctl.decode.processors.token_bytes import bytes_of, is_byte, is_byte_level, special_of, steps_of
from genctl.errors import InputError, ModelError
from genctl.events import shared_length
from genctl.models.libraries import is_library_error, without_panic_reports

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from genctl.models.hub import LoadedModel

DecodeMode: TypeAlias = Literal["bytes", "pieces", "whole"]


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
        if is_library_error(error):
            raise InputError(f"the tokenizer cannot read the prompt: {type(error).__name__}: {error}") from error
        raise
    if not ids:
        raise InputError("the prompt tokenises to nothing")
    return ids


def continuation(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text that continues another one: many tokenizers put a space before a first word.

    Raises InputError.
    """
    alone = encode(tokenizer, text, add_special_tokens=False)
    for before in (",", "\n", "a"):
        try:
            head, joint = (encode(tokenizer, each, add_special_tokens=False) for each in (before, before + text))
        except InputError:  # a tokenizer that drops spaces
            continue
        if decode(tokenizer, [*head, *alone]) == before + text:
            return alone
        if joint[: len(head)] == head and len(joint) > len(head):
            return joint[len(head) :]
    return alone


def doubled_bos(tokenizer: Any, ids: Sequence[int], bos: Sequence[int | None], why: str) -> str:
    """A note if a prompt begins with BOS twice, which few models have seen; else ""."""
    if len(ids) < 2 or ids[0] != ids[1] or ids[0] not in bos:
        return ""
    name = tokenizer.convert_ids_to_tokens(ids[0])
    return f"the prompt begins with {name} twice: {why}; leave {name} out of what you write"


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises InputError for an id beyond the model's embedding."""
    for place, id in enumerate(ids, 1):
        if not 0 <= id < vocab_size:
            raise InputError(f"token {place} of the prompt has id {id}, but the model's ids are 0 to {vocab_size - 1}")


def decode(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    """The text of a record: special tokens left out, undecodable bytes as U+FFFD."""
    return decode_as(tokenizer, list(ids), skip_special_tokens=True)


def decode_as(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], *, skip_special_tokens: bool, clean: bool | None = None
) -> str:
    """The text of ids, with or without special tokens. `clean`: by default as `_cleans`. Raises ModelError."""
    clean = _cleans(tokenizer) if clean is None else clean
    try:
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=clean))
    except BaseException as error:
        if is_library_error(error):
            raise ModelError(f"the tokenizer cannot decode its own ids: {type(error).__name__}") from error
        raise


def _cleans(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether decode() removes spaces before punctuation. transformers never does so for BPE unless forced to."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return backend is None or type(backend.model).__name__ != "BPE" or bool(getattr(tokenizer, forced, False))


def _safe_cut(text: str, start: int) -> int:
    """The last place, from `start` on, at which the text can be cleaned in two parts; 0 if there is none.

    The clean-up only removes spaces around certain texts (" ." " ' " " n't" " 's" …). A cut before a space is safe if
    the text before it cannot be the inside of such a pattern.
    """
    for at in range(len(text) - 1, max(start - 1, 0), -1):
        if text[at] == " " and (text[at - 1] not in " 'nvr" or (at > 1 and text[at - 2].isalnum())):
            return at
    return 0


class DecodingVocabulary:
    """State that detokenizers of one tokenizer share: how it decodes, and the text of single tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip: bool) -> None:
        self.tokenizer, self.skip, self.clean = tokenizer, skip, _cleans(tokenizer)
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        self.mode, self.fallback = _decode_mode(tokenizer)
        self.special = frozenset(tokenizer.all_special_ids) if self.backend is None else special_of(self.backend)
        # cached by id: called for each token of a text
        self.bytes_of, self.piece, self.alone = cache(self._bytes_of), cache(self._piece), cache(self._alone)
        # whether an id affects the text: decode() leaves out skipped ids and those without a token
        self.writes = cache(lambda id: not (skip and id in self.special) and self.token(id) is not None)

    def text(self, ids: list[int], *, clean: bool | None = None) -> str:
        """decode() of ids, with the tokenizer's own clean-up of spaces, or as `clean` says."""
        return decode_as(self.tokenizer, ids, skip_special_tokens=self.skip, clean=clean)

    def _alone(self, id: int) -> str:
        return self.text([id], clean=False)

    def lead(self, prompt: Sequence[int]) -> list[int]:
        """The end of a prompt that decides what text new tokens add: nothing before it changes that."""
        least = 1  # doubled if a clean-up may change earlier text: the total cost is proportional to the result
        for place in range(len(prompt) - 1, -1, -1) if self.mode != "whole" else ():
            if len(prompt) - place >= least and self._begins(prompt[place]):
                lead = list(prompt[place:])
                if not self.clean or _safe_cut(self.text(lead, clean=False), 0):
                    return lead
                least = 2 * len(lead)
        return list(prompt)

    def _begins(self, id: int) -> bool:
        """Whether the text from this id on is the same after any ids, except for a blank at its beginning."""
        if not self.writes(id):
            return False
        if self.mode == "bytes":
            return bool(self.bytes_of(id)) and not 0x80 <= self.bytes_of(id)[0] < 0xC0
        return not self.is_byte(id)

    def token(self, id: int) -> str | None:
        """The token of an id; None for an id without one."""
        if self.backend is not None:
            return cast("str | None", self.backend.id_to_token(id))
        return cast("str | None", self.tokenizer.convert_ids_to_tokens(id))

    def is_byte(self, id: int) -> bool:
        """Whether the token is one byte (<0xE2>) of a byte-fallback vocabulary."""
        return self.fallback and is_byte(self.token(id))

    def _bytes_of(self, id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary; b"" for an id that it lacks."""
        literal = getattr(self.tokenizer, "literal", {})
        return literal[id].encode() if id in literal else bytes_of(self.token(id) or "")

    def _piece(self, id: int) -> str:
        """The text of one token alone, special tokens included; incomplete characters as bytes: <0xE2>."""
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
        before, both = self.alone(self.anchor), self.text([self.anchor, id], clean=False)
        return both[len(before) :] if both.startswith(before) else self.alone(id)

    @cached_property
    def anchor(self) -> int:
        """A token whose text does not change what follows."""
        plain = (id for id in range(len(self.tokenizer)) if id not in self.special and not self.is_byte(id))
        return next((id for id in plain if self.alone(id).strip()), 0)


@lru_cache(maxsize=8)  # tokenizers are equal only to themselves, and a process has only a few
def _vocabulary_of(tokenizer: PreTrainedTokenizerBase, skip: bool) -> DecodingVocabulary:
    return DecodingVocabulary(tokenizer, skip)


def _decode_mode(tokenizer: PreTrainedTokenizerBase) -> tuple[DecodeMode, bool]:
    """How text can be decoded piece by piece, and whether runs of byte tokens must stay together."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ("pieces", True) if hasattr(tokenizer, "sp_model") else ("whole", False)
    steps, fused = steps_of(backend), False
    if is_byte_level(steps):
        return "bytes", False
    for step in steps:
        if step["type"] == "Strip":
            if step["stop"] or not fused:
                return "whole", False
        elif step["type"] == "Fuse":
            fused = True
        elif step["type"] not in ("Replace", "ByteFallback", "Metaspace", "WordPiece", "BPEDecoder") or fused:
            return "whole", False
    return "pieces", any(step["type"] == "ByteFallback" for step in steps)


class Detokenizer:
    """Text from ids that come one by one.

    The results of `push` and the last one of `flush` add up to decode(ids). `push` has constant amortised cost. A new
    detokenizer begins a text; the one from `after` continues a prompt.
    Byte-level vocabularies hold back at most three bytes. Byte-fallback ones hold back the current run of byte tokens,
    since one bad byte changes the text of the whole run. A clean-up of spaces holds back about a word.
    Vocabularies whose decoder can change any earlier text (rare) hold back everything.
    """

    only_ids = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = _vocabulary_of(tokenizer, skip_special_tokens)
        self.writes, self.piece = self.vocabulary.writes, self.vocabulary.piece
        # Everything below is replaced and never changed in place, so that a fork may share it.
        self._bytes = b""  # in the mode "bytes": of an incomplete character
        self._context: list[int] = []  # in the mode "pieces": the id before `_pending`
        self._pending: list[int] = []
        self._held = ""  # decoded, but the clean-up of spaces may still change it
        self._searched = 0  # characters of `_held` that were searched for a place to cut
        self._lead: list[int] = []  # as much of the prompt's end as affects what follows
        self._lead_text = ""
        self._shown = ""  # the end of `_lead_text` that new tokens may change: the first text may repeat it
        self._repeated = ""  # as much of it as was repeated so far

    def after(self, prompt: Sequence[int], cut: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer of new tokens after a prompt: their text is what decode(prompt + ids) adds to decode(prompt).

        If new tokens change the end of the prompt (they complete a character), their text begins with the first
        character that differs. `cut` are tokens removed from the prompt's end, whose text new tokens write again.
        """
        words = Detokenizer(self.tokenizer, self.vocabulary.skip)
        words._lead = self.vocabulary.lead(prompt)
        certain = "".join([words.push(id) for id in words._lead])
        words._lead_text = self.vocabulary.text([*words._lead, *cut])
        words._shown = words._lead_text[len(certain) :]
        return words

    def push(self, id: int) -> str:
        """The characters that this token completes; "" while one is incomplete."""
        text = self._raw(id)
        return self._added(self._cleaned(text, final=False) if self.vocabulary.clean else text)

    def flush(self) -> str:
        """The rest. An incomplete character becomes U+FFFD, as in decode()."""
        if self.vocabulary.mode == "bytes":
            text, self._bytes = self._bytes.decode(errors="replace"), b""
        else:
            text = self._settle()
        return self._added(self._cleaned(text, final=True) if self.vocabulary.clean else text)

    def rest(self) -> str:
        """What `flush` would return, without ending the text."""
        return self.fork().flush() if self._bytes or self._pending or self._held or self._repeated else ""

    def fork(self) -> Detokenizer:
        """A second detokenizer in the same state."""
        twin = Detokenizer.__new__(Detokenizer)
        vars(twin).update(vars(self))  # five times as fast as `copy.copy`
        return twin

    def decode(self, ids: Iterable[int]) -> str:
        """The whole text at once."""
        text = self.vocabulary.text([*self._lead, *ids])
        known = self._lead_text
        return text[len(known) if text.startswith(known) else shared_length(text, known) :]

    def _added(self, text: str) -> str:
        """A text without the part that repeats the prompt."""
        if not self._shown or not text:
            return text
        text = self._repeated + text
        same = shared_length(text, self._shown)
        if same == len(text) < len(self._shown):
            self._repeated = text
            return ""
        self._shown = self._repeated = ""
        return text[same:]

    def _raw(self, id: int) -> str:
        vocabulary = self.vocabulary
        if not vocabulary.writes(id):
            return ""
        if vocabulary.mode == "bytes":
            content = self._bytes + vocabulary.bytes_of(id)
            text, read = codecs.utf_8_decode(content, "replace", False)
            self._bytes = content[read:]
            return text
        self._pending = [*self._pending, id]
        if vocabulary.mode == "whole" or vocabulary.is_byte(id):
            return ""
        return self._settle()

    def _settle(self) -> str:
        """Decode the pending ids, with the id before them, because decoders treat the first id differently."""
        if not self._pending:
            return ""
        before = self.vocabulary.alone(self._context[0]) if self._context else ""
        text = self.vocabulary.text(self._context + self._pending, clean=False)[len(before) :]
        self._context, self._pending = self._pending[-1:], []
        return text

    def _cleaned(self, text: str, *, final: bool) -> str:
        """The part of the text that the clean-up of spaces will not change any more, cleaned."""
        text = self._held + text
        cut = len(text) if final else _safe_cut(text, self._searched)
        self._held = text[cut:]
        self._searched = len(self._held)
        return str(self.tokenizer.clean_up_tokenization(text[:cut])) if cut else ""


class IdDetokenizer:
    """The detokenizer without a tokenizer: sequences have no text, and a token is shown as its id, <17>."""

    only_ids = True

    def after(self, prompt: Sequence[int] = (), cut: Sequence[int] = ()) -> IdDetokenizer:
        """Itself: there is no text and no state."""
        return self

    fork = after

    def writes(self, id: int) -> bool:
        """No."""
        return False

    def decode(self, ids: Iterable[int] = ()) -> str:
        """No text."""
        return ""

    flush = rest = decode

    def piece(self, id: int) -> str:
        """The id, as a Detokenizer shows an id that its tokenizer lacks."""
        return f"<{id}>"

    push = piece  # for display; it is not part of the text


Words: TypeAlias = "Detokenizer | IdDetokenizer"


def detokenizer(tokenizer: PreTrainedTokenizerBase | None) -> Words:
    """A new detokenizer for a tokenizer, or for none."""
    return IdDetokenizer() if tokenizer is None else Detokenizer(tokenizer)

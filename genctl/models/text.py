"""Ids become text, whole characters only; and text becomes ids.

A tokenizer's decode() of a whole sequence is the truth. A `Detokenizer` tells it piece by piece: what it has told so
far is always a beginning of it, and what it keeps back is only what later tokens could still change.
"""

from __future__ import annotations

import codecs
import copy
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from genctl.errors import InputError, ModelError
from genctl.events import Ended, Event, Finished, Hypothesis, Row, RowStates, Stepped, Token, with_tokens
from genctl.models import rust_panics

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
        with rust_panics.without_panic_reports():
            ids = list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    except BaseException as error:
        if _gave_up(error):
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
    """Text from ids that come one by one. The pieces told, and the last one from `flush`, add up to decode(ids).

    `push` costs the same for every token on average. Byte-level vocabularies keep back at most three bytes;
    byte-fallback ones the current run of byte tokens, since one bad byte changes what the whole run becomes; those
    whose decoder can change any earlier text (rare) keep back everything.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = _vocabulary(tokenizer, skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # the way "bytes"
        self._context: list[int] = []  # the way "pieces": the id before `_pending`
        self._pending: list[int] = []
        self._held = ""  # decoded, but the clean-up of spaces may still change it
        self._looked = 0  # how far `_held` was searched for a place to cut

    def push(self, id: int) -> str:
        """The characters that this token completed; "" while one is still open."""
        return self._clean(self._raw(id), final=False)

    def flush(self) -> str:
        """What is left at the end. An incomplete character is U+FFFD, as decode() has it."""
        if self.vocabulary.way == "bytes":
            text = self._utf8.decode(b"", final=True)
            self._utf8.reset()
        else:
            text = self._settle()
        return self._clean(text, final=True)

    def fork(self) -> Detokenizer:
        """A second one in the same state; the two go on independently."""
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
        """What one token alone stands for, special ones included; bytes that are no character as <0xE2>."""
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
        """Decode what is pending, after the one token that tells the decoder it is not at the beginning."""
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


class IdsAlone:
    """What a Detokenizer is where there is no tokenizer: a sequence has no text, a token is shown as its id, <17>."""

    def push(self, id: int) -> str:
        """The id, for the eye: it is no part of any text."""
        return self.piece(id)

    def flush(self) -> str:
        """Nothing is kept back."""
        return ""

    def fork(self) -> IdsAlone:
        """Nothing is kept at all."""
        return self

    def decode(self, ids: Iterable[int]) -> str:
        """No text."""
        return ""

    def piece(self, id: int) -> str:
        """As a Detokenizer shows an id that its tokenizer lacks."""
        return f"<{id}>"


Words: TypeAlias = "Detokenizer | IdsAlone"


def detokenizer(tokenizer: PreTrainedTokenizerBase | None) -> Words:
    """A new detokenizer for what a checkpoint has."""
    return IdsAlone() if tokenizer is None else Detokenizer(tokenizer)


class _Vocabulary:
    """What all detokenizers of one tokenizer share: how it decodes, and what single tokens stand for."""

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
            token = self.token(id) or ""
            table = _byte_table()
            known = all(char in table for char in token)
            content = self._bytes[id] = bytes(table[char] for char in token) if known else token.encode()
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
    # Tokenizers cannot be weakly referenced by value; a handful per process is all there ever is.
    key = (id(tokenizer), skip)
    if key not in _SHARED or _SHARED[key][0] is not tokenizer:
        while len(_SHARED) >= 8:
            _SHARED.pop(next(iter(_SHARED)))
        _SHARED[key] = tokenizer, _Vocabulary(tokenizer, skip)
    return _SHARED[key][1]


def _way(tokenizer: PreTrainedTokenizerBase) -> tuple[Way, bool]:
    """How text can be told piece by piece, and whether runs of byte tokens must be kept together."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ("pieces", True) if hasattr(tokenizer, "sp_model") else ("whole", False)
    decoder = json.loads(backend.to_str())["decoder"]
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
        if _gave_up(error):
            raise ModelError(f"the tokenizer cannot decode its own ids: {type(error).__name__}") from error
        raise


def _gave_up(error: BaseException) -> bool:
    """Whether a tokenizer failed; a panic in Rust is no `Exception` in Python, and neither is an interrupt."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _safe_cut(text: str, start: int) -> int:
    """The last place, from `start` on, where text can be cut so that cleaning the parts cleans the whole; 0 if none.

    The clean-up only ever removes a space, together with what follows it (" ." " ' " " n't" " 's" …). A cut before a
    space is safe if what precedes it can be no inner part of such a pattern.
    """
    for at in range(len(text) - 1, max(start - 1, 0), -1):
        if text[at] == " " and (text[at - 1] not in " 'nvr" or (at > 1 and text[at - 2].isalnum())):
            return at
    return 0


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, and which byte each stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _byte_name(token: str | None) -> bool:
    return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def caption(events: Iterable[Event], detokenizer_factory: Callable[[], Words]) -> Iterator[Event]:
    """The same events with every `text` filled in: of tokens, of their alternatives, of hypotheses.

    One detokenizer follows each live row; it is forked where a row has several children. The last token of a row that
    ended carries what was still open.
    """
    reader = detokenizer_factory()
    states = RowStates(lambda lane: (reader.fork(), ()), _captioned, _forked)
    for event in events:
        if isinstance(event, Stepped):
            live, ended = states.step(event)
            last = tuple(map(_ended, event.ended, ended)) if ended else ()
            yield with_tokens(event, [written for _, written in live], last)
            continue
        states.forget(event)
        if isinstance(event, Finished):
            yield dataclasses.replace(
                event, hypotheses=tuple(_hypothesis(hypothesis, reader) for hypothesis in event.hypotheses)
            )
        else:
            yield event


_Captioned: TypeAlias = "tuple[Words, tuple[Token, ...]]"  # a row's detokenizer, and the newest tokens with their text


def _captioned(state: _Captioned, row: Row | Ended) -> _Captioned:
    words, written = state[0], []
    for token in row.written:
        top = tuple((id, words.piece(id), logprob) for id, _, logprob in token.top) if token.top else ()
        watched = tuple((id, words.piece(id), logprob, rank) for id, _, logprob, rank in token.watched)
        # spelled out: `dataclasses.replace` takes three times as long, for every token
        text = words.push(token.id)
        written.append(Token(token.id, token.logprob, text, token.rank, token.entropy, top, token.trace, watched))
    return words, tuple(written)


def _forked(state: _Captioned) -> _Captioned:
    return state[0].fork(), ()


def _ended(row: Ended, state: _Captioned) -> Ended:
    words, written = state
    if written:
        *others, last = written
        written = (*others, dataclasses.replace(last, text=last.text + words.flush()))
    return dataclasses.replace(row, written=written, hypothesis=_hypothesis(row.hypothesis, words))


def _hypothesis(hypothesis: Hypothesis, words: Words) -> Hypothesis:
    return dataclasses.replace(hypothesis, text=words.decode(hypothesis.tokens))

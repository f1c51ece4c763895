"""Ids to text, whole characters only; and text to ids.

The reference is the tokenizer's decode() of the whole sequence, prompt included: the text of new tokens is what
decode(prompt + new) adds to decode(prompt). Many decoders drop a blank at the beginning of a sequence, so new tokens
decoded alone lack the blank after the prompt. A `Detokenizer` produces the same text piece by piece: its output so far
is always a prefix, and it holds back only what later tokens can still change.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from genctl.errors import InputError, ModelError, UsageError
from genctl.events import shared_length
from genctl.models.decoding import cleans, decoded, safe_cut, vocabulary_of
from genctl.models.libraries import is_library_error, without_panic_reports

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from genctl.models.hub import LoadedModel


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
    """Raises InputError for an id that the model's embedding does not have."""
    for place, id in enumerate(ids, 1):
        if not 0 <= id < vocab_size:
            raise InputError(f"token {place} of the prompt has id {id}, but the model's ids are 0 to {vocab_size - 1}")


def decode(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    """The text of a record: special tokens left out, undecodable bytes as U+FFFD."""
    return decoded(tokenizer, list(ids), skip_special_tokens=True, clean=cleans(tokenizer))


class Detokenizer:
    """Text from ids that come one by one.

    The results of `push` and the last one of `flush` add up to decode(ids). `push` has constant amortised cost. A new
    one begins a text; that of `after` continues a prompt.
    Byte-level vocabularies hold back at most three bytes. Byte-fallback ones hold back the current run of byte tokens,
    since one bad byte changes the text of the whole run. Vocabularies whose decoder can change any earlier text (rare)
    hold back everything.
    """

    only_ids = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary_of(tokenizer, skip_special_tokens)
        # Everything below is replaced and never changed in place, so that a fork may share it.
        self._bytes = b""  # in the mode "bytes": of a character that is incomplete
        self._context: list[int] = []  # in the mode "pieces": the id before `_pending`
        self._pending: list[int] = []
        self._held = ""  # decoded, but the clean-up of spaces may still change it
        self._searched = 0  # characters of `_held` that were searched for a place to cut
        self._lead: list[int] = []  # the end of the prompt, as much of it as changes what follows
        self._lead_text = ""
        self._shown = ""  # the end of `_lead_text` that new tokens may change: the first text may repeat it
        self._repeated = ""  # as much of it as came again

    def after(self, prompt: Sequence[int], cut: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer of new tokens behind a prompt: their text is what decode(prompt + ids) adds to decode(prompt).

        Where new tokens change the end of the prompt (they complete a character), their text begins with the first
        character that differs. `cut` are tokens removed from the prompt's end, whose text new tokens write again.
        """
        words = Detokenizer(self.tokenizer, self.vocabulary.skip)
        words._lead = self.vocabulary.lead(prompt)
        certain = "".join([words.push(id) for id in words._lead])
        words._lead_text = self._whole([*words._lead, *cut])
        words._shown = words._lead_text[len(certain) :]
        return words

    def push(self, id: int) -> str:
        """The characters that this token completes; "" while one is incomplete."""
        return self._added(self._clean(self._raw(id), final=False))

    def flush(self) -> str:
        """The rest. An incomplete character is U+FFFD, as in decode()."""
        if self.vocabulary.mode == "bytes":
            text, self._bytes = self._bytes.decode(errors="replace"), b""
        else:
            text = self._settle()
        return self._added(self._clean(text, final=True))

    def rest(self) -> str:
        """What `flush` would return, and the text does not end."""
        return self.fork().flush() if self._bytes or self._pending or self._held or self._repeated else ""

    def fork(self) -> Detokenizer:
        """A second detokenizer in the same state."""
        twin = Detokenizer.__new__(Detokenizer)
        vars(twin).update(vars(self))  # five times as fast as `copy.copy`
        return twin

    def decode(self, ids: Iterable[int]) -> str:
        """The whole text at once."""
        text = self._whole([*self._lead, *ids])
        known = self._lead_text
        return text[len(known) if text.startswith(known) else shared_length(text, known) :]

    def writes(self, id: int) -> bool:
        """Whether the text depends on this id: it is neither skipped nor missing in the vocabulary."""
        return self.vocabulary.writes(id)

    def piece(self, id: int) -> str:
        """The text of one token alone, special tokens included; incomplete characters as bytes: <0xE2>."""
        return self.vocabulary.piece(id)

    def _whole(self, ids: list[int]) -> str:
        vocabulary = self.vocabulary
        return decoded(self.tokenizer, ids, skip_special_tokens=vocabulary.skip, clean=vocabulary.clean)

    def _added(self, text: str) -> str:
        """A text without what it repeats of the prompt."""
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
        if vocabulary.mode == "bytes" and not self._bytes and (whole := vocabulary.characters(id)) is not None:
            return whole
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
        text = self.vocabulary.raw(self._context + self._pending)[len(before) :]
        self._context, self._pending = self._pending[-1:], []
        return text

    def _clean(self, text: str, *, final: bool) -> str:
        if not self.vocabulary.clean:
            return text
        self._held += text
        cut = len(self._held) if final else safe_cut(self._held, self._searched)
        if not cut:
            self._searched = len(self._held)
            return ""
        ready, self._held = self._held[:cut], self._held[cut:]
        self._searched = len(self._held)
        return str(self.tokenizer.clean_up_tokenization(ready))


class IdDetokenizer:
    """The detokenizer without a tokenizer: sequences have no text, and a token is shown as its id, <17>."""

    only_ids = True

    def after(self, prompt: Sequence[int], cut: Sequence[int] = ()) -> IdDetokenizer:
        """Itself: there is no text."""
        return self

    def writes(self, id: int) -> bool:
        """No."""
        return False

    def flush(self) -> str:
        """Nothing: there is no text."""
        return ""

    rest = flush

    def fork(self) -> IdDetokenizer:
        """Itself: there is no state."""
        return self

    def decode(self, ids: Iterable[int]) -> str:
        """No text."""
        return ""

    def piece(self, id: int) -> str:
        """The id, as a Detokenizer shows an id that its tokenizer lacks."""
        return f"<{id}>"

    push = piece  # for display; it is not part of the text


Words: TypeAlias = "Detokenizer | IdDetokenizer"


def detokenizer(tokenizer: PreTrainedTokenizerBase | None) -> Words:
    """A new detokenizer for a tokenizer, or for none."""
    return IdDetokenizer() if tokenizer is None else Detokenizer(tokenizer)


# -- tokens given by their text or their id ----------------------------------------------------------------------------


def watched_ids(loaded: LoadedModel, tokens: Sequence[str]) -> tuple[int, ...]:
    """The ids of the tokens of --watch, each a text or `id:N`, without repetition. Raises UsageError."""
    return tuple(dict.fromkeys(_watched_id(loaded, token) for token in tokens))


def _watched_id(loaded: LoadedModel, token: str) -> int:
    number = token.removeprefix("id:")
    if number != token and number.isascii() and number.isdigit():
        # a number of too many digits is no int (`sys.set_int_max_str_digits`)
        if len(number) > 18 or int(number) >= loaded.vocab_size:
            raise UsageError(f"--watch {token}: the ids of {loaded.name} are 0 to {loaded.vocab_size - 1}")
        return int(number)
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise UsageError(f"--watch {token!r}: {loaded.name} has no tokenizer", hint="--watch id:N names a token's id")
    words = detokenizer(tokenizer)
    try:
        ids = _ids_of(tokenizer, words, token) if token else []
    except InputError as error:
        raise UsageError(f"--watch {token!r}: {error.message}") from None
    if len(ids) != 1:
        parts = ", ".join(f"{words.piece(id)!r} (id:{id})" for id in ids)
        raise UsageError(
            f"--watch {token!r} is not one token of {loaded.name}" + (f" but {len(ids)}: {parts}" if ids else ""),
            hint="name one of them: a space before a word belongs to its token" if ids else "",
        )
    unknown = tokenizer.unk_token_id
    if ids[0] == unknown and token.strip() != tokenizer.unk_token:
        raise UsageError(f"--watch {token!r}: the tokenizer of {loaded.name} does not know it and reads id:{unknown}")
    if ids[0] >= loaded.vocab_size:
        raise UsageError(f"--watch {token!r} is id:{ids[0]}, but {loaded.name} has only {loaded.vocab_size} ids")
    return ids[0]


def _ids_of(tokenizer: Any, words: Words, token: str) -> list[int]:
    """The ids of a text: as it stands alone, or behind other text where only so it is one token."""
    alone = encode(tokenizer, token, add_special_tokens=False)
    if len(alone) == 1 and (words.piece(alone[0]) == token or not token[0].isspace()):
        return alone
    behind = continuation(tokenizer, token)
    return behind if len(behind) == 1 and words.piece(behind[0]) == token else alone

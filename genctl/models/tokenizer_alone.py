"""The tokenizer of a checkpoint on this machine, without its model, and the tokens that users name.

Nothing here imports torch or transformers, but `find` leaves a tokenizer that genctl does not read itself to
transformers, which imports torch.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from genctl.errors import InputError, UsageError, printable, quote
from genctl.models import check, gguf, text
from genctl.models.check import GenerationSettings
from genctl.models.resolve import resolve
from genctl.models.weights import WeightFiles

if TYPE_CHECKING:
    from genctl.models.hub import LoadedModel

_LANGUAGE = re.compile(r"[a-z]{2,3}(_[A-Za-z]{2,4})?")  # "en", "en_XX", "eng_Latn"


class LoneTokenizer:
    """Texts to ids, as for a prompt of the checkpoint, and back. Raises ModelError if it cannot be loaded."""

    def __init__(self, name: str) -> None:
        self._tokenizer: Any = find(name).tokenizer

    def ids(self, prompt: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the tokenizer adds. Raises InputError."""
        return text.encode(self._tokenizer, prompt, add_special_tokens=True)

    def text(self, ids: tuple[int, ...]) -> str:
        """The text with these ids. Raises InputError if there is none."""
        words = text.decode(self._tokenizer, ids)
        if not words or self.ids(words) != list(ids):
            raise InputError("the token ids are not those of any text, and the server takes no ids")
        return words


class FoundTokenizer(NamedTuple):
    """The tokenizer of a checkpoint, and its BOS according to all its files."""

    tokenizer: Any
    left_to: str  # "transformers (there is no tokenizer.json)"; "" for genctl's own
    bos: tuple[int, ...]  # the ids that count as BOS


def find(name: str, revision: str | None = None) -> FoundTokenizer:
    """The tokenizer of a checkpoint on this machine; reads no other files of it. Raises ModelError, UsageError.

    One that genctl does not read itself is read by transformers, which imports torch.
    """
    from genctl.models.hub import tokenizer_of

    place = resolve(name, revision=revision, offline="a tokenizer is read from the cache alone")
    folder, config, file = place.folder, {}, ""
    if place.gguf is not None:
        gguf.tokenizer_header(place.gguf)
        file = place.gguf.name
    else:
        check.check_files(folder)
        if (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
            config = check.read_config(folder)
        check.check_tokenizer(folder, needed=True)
    checkpoint = check.Checkpoint(folder, config, GenerationSettings({}, ""), WeightFiles((), {}), True, {}, file)
    tokenizer, left_to = tokenizer_of(checkpoint)
    if isinstance(size := config.get("vocab_size"), int):
        check.check_vocabulary(tokenizer, size)
    bos = tuple(id for id in (tokenizer.bos_token_id, config.get("bos_token_id")) if isinstance(id, int))
    return FoundTokenizer(tokenizer, f"transformers ({left_to})" if left_to else "", bos)


@dataclass(frozen=True)
class TokenPiece:
    """A token of a text."""

    id: int
    text: str
    bytes: bytes = b""  # if it holds a part of a character
    completes: str = ""  # the characters that those bytes complete
    special: str = ""  # "added" by the tokenizer, "written" in the text, or "unknown": <unk> in place of a text

    def record(self) -> dict[str, Any]:
        """The token in a record."""
        more: dict[str, Any] = {"bytes": list(self.bytes)} if self.bytes else {}
        return {"id": self.id, "text": self.text, **more, **({"special": self.special} if self.special else {})}


@dataclass(frozen=True)
class TokenReading:
    """A text as one tokenizer reads it; for --decode, ids as it writes them."""

    model: str
    text: str
    pieces: tuple[TokenPiece, ...]
    notes: tuple[str, ...] = ()

    @property
    def ids(self) -> list[int]:
        return [piece.id for piece in self.pieces]


class TokenReader:
    """Reads texts with the tokenizer of a checkpoint (see `find`), and notes what is unusual."""

    def __init__(self, name: str, revision: str | None = None) -> None:
        self.name = name
        self.found = find(name, revision)
        self.tokenizer = self.found.tokenizer
        self.vocabulary = text.Detokenizer(self.tokenizer, skip_special_tokens=False).vocabulary
        known = self.tokenizer.unk_token in (None, self.tokenizer.bos_token, self.tokenizer.eos_token)  # as in GPT-2
        self.unknown: int | None = None if known else self.tokenizer.unk_token_id

    def read(self, prompt: str) -> TokenReading:
        """The tokens of a text. Raises InputError."""
        ids, bare = text.encode(self.tokenizer, prompt, add_special_tokens=True), self._bare(prompt)
        start = next((at for at in range(len(ids)) if ids[at : at + len(bare)] == bare), 0)
        notes = (
            text.doubled_bos(self.tokenizer, ids, self.found.bos, "the tokenizer writes it before each prompt"),
            self._specials("the text", prompt, bare),
            self._open_end(prompt, bare),
        )
        pieces = self._pieces(ids, range(start, start + len(bare)))
        return TokenReading(self.name, prompt, pieces, tuple(filter(None, notes)))

    def decode(self, ids: Sequence[int]) -> TokenReading:
        """The text of ids, special tokens included. Raises InputError for an id without a token."""
        unknown = next((id for id in ids if id >= 1 << 31 or self.vocabulary.token(id) is None), None)
        if unknown is not None:
            raise InputError(f"the tokenizer of {self.name} has no token {unknown}")
        words = self.vocabulary.text(list(ids))
        same = [*ids] in (again := self._bare(words), self._bare(words, special=True))
        more = " …" if len(again) > 12 else ""
        note = f"the tokenizer reads this text as other ids: {', '.join(map(str, again[:12]))}{more}"
        return TokenReading(self.name, words, self._pieces(ids, range(len(ids))), () if same else (note,))

    def read_chat(
        self, messages: Sequence[Mapping[str, Any]], *, system: str | None = None, **how: Any
    ) -> TokenReading:
        """The tokens of a conversation: the chat template filled in. `how` goes to `render_chat_text`.

        Raises InputError or ModelError.
        """
        from genctl.models import chat

        turns = [dict(one) for one in messages]
        rendered = chat.render_chat_text(self.tokenizer, turns, system=system, name=self.name, **how)
        ids = text.encode(self.tokenizer, rendered, add_special_tokens=False)
        why = "the chat template writes it before a message that begins with it"
        notes = (
            text.doubled_bos(self.tokenizer, ids, self.found.bos, why),
            self._missing_bos(ids),
            *(self._specials(f"message {at}", one.get("content") or "") for at, one in enumerate(messages, 1)),
            self._specials("the system message", system or ""),
        )
        return TokenReading(self.name, rendered, self._pieces(ids, range(len(ids))), tuple(filter(None, notes)))

    def _bare(self, words: str, *, special: bool = False) -> list[int]:
        """The ids of a text, with added special tokens only if `special`; [] if there is none."""
        try:
            return text.encode(self.tokenizer, words, add_special_tokens=special)
        except InputError:
            return []

    def _pieces(self, ids: Sequence[int], own: range) -> tuple[TokenPiece, ...]:
        """The tokens; those outside `own` were added by the tokenizer."""
        vocabulary, before, pieces = self.vocabulary, b"", []
        for place, id in enumerate(ids):
            special, part = "", b""
            if id in vocabulary.special:
                special = "added" if place not in own else "unknown" if id == self.unknown else "written"
            elif vocabulary.is_byte(id):
                part = bytes.fromhex(vocabulary.piece(id)[3:5])
            elif vocabulary.mode == "bytes" and "\ufffd" in vocabulary.bytes_of(id).decode(errors="replace"):
                part = vocabulary.bytes_of(id)
            done, read = codecs.utf_8_decode(before + part, "replace", False)
            before = (before + part)[read:] if part else b""
            done = "" if "\ufffd" in done or not part else done
            pieces.append(TokenPiece(id, vocabulary.piece(id), part, done, special))
        return tuple(pieces)

    def _missing_bos(self, ids: Sequence[int]) -> str:
        """A note if a chat does not begin with BOS, which the tokenizer adds to texts."""
        bos = self.found.bos
        if ids[0] in bos or self._bare("a", special=True)[:1] not in ([id] for id in bos):
            return ""
        why = "the tokenizer puts it before a text, and the chat template leaves it out"
        return f"the prompt does not begin with {self.tokenizer.convert_ids_to_tokens(bos[0])}: {why}"

    def _specials(self, whose: str, words: str, ids: Sequence[int] | None = None) -> str:
        """A note on special tokens that are spelled in a text; `ids` if they are known."""
        ids, special = self._bare(words) if ids is None else ids, self.vocabulary.special
        names = dict.fromkeys(self.vocabulary.piece(id) for id in ids if id in special)
        spelled = [printable(name) for name in names if name in words]
        are = "is read as a special token" if len(spelled) == 1 else "are read as special tokens"
        return f"{whose} holds {', '.join(spelled)}, which {are} and not as text" if spelled else ""

    def _open_end(self, words: str, ids: list[int]) -> str:
        """A note if a text ends with white space that belongs to the token of a word after it."""
        if not words[-1:].isspace() or all(self._bare(words + letter)[: len(ids)] == ids for letter in "atS"):
            return ""
        kind = "a space" if words[-1] == " " else "white space"
        return f"the text ends with {kind}, which is a part of the next word's token: leave it out, or --token-healing"


# -- tokens given by their text or their id ----------------------------------------------------------------------------


def watched_ids(loaded: LoadedModel, tokens: Sequence[str]) -> tuple[int, ...]:
    """The ids of the tokens of --watch, each a text or `id:N`, without duplicates. Raises UsageError."""
    return tuple(dict.fromkeys(_watched_id(loaded, token) for token in tokens))


def _watched_id(loaded: LoadedModel, token: str) -> int:
    what, tokenizer, number = f"--watch {token!r}", loaded.tokenizer, token.removeprefix("id:")
    if number != token and number.isascii() and number.isdigit() and len(number) < 19:
        if int(number) >= loaded.vocab_size:
            raise UsageError(f"--watch {token}: the ids of {loaded.name} are 0 to {loaded.vocab_size - 1}")
        return int(number)
    if tokenizer is None:
        raise UsageError(f"{what}: {loaded.name} has no tokenizer", hint="--watch id:N names a token's id")
    piece = text.Detokenizer(tokenizer).piece
    try:
        ids = text.encode(tokenizer, token, add_special_tokens=False)
        if len(ids) != 1 or (piece(ids[0]) != token and token[0].isspace()):
            behind = text.continuation(tokenizer, token)  # one token only after other text
            ids = behind if len(behind) == 1 and piece(behind[0]) == token else ids
    except InputError as error:
        raise UsageError(f"{what}: {error.message}") from None
    if len(ids) != 1:
        parts = ", ".join(f"{piece(id)!r} (id:{id})" for id in ids)
        raise UsageError(
            f"{what} is not one token of {loaded.name} but {len(ids)}: {parts}",
            hint="name one of them: a space before a word belongs to its token",
        )
    if ids[0] == tokenizer.unk_token_id and token.strip() != tokenizer.unk_token:
        raise UsageError(f"{what}: the tokenizer of {loaded.name} does not know it and reads id:{ids[0]}")
    if ids[0] >= loaded.vocab_size:
        raise UsageError(f"{what} is id:{ids[0]}, but {loaded.name} has only {loaded.vocab_size} ids")
    return ids[0]


# -- languages of multilingual tokenizers (NLLB, mBART, M2M-100): each has a token, in a source and in a translation ---
# As in transformers' translation pipeline: the tokenizer writes the token of `src_lang` beside a source, and the token
# of `tgt_lang` is the first that the decoder is made to write (`forced_bos_token_id`).


def languages_of(tokenizer: Any) -> dict[str, int]:
    """The id of the token of each language, by the tokenizer's own names; {} if there are none."""
    if not hasattr(type(tokenizer), "src_lang"):
        return {}
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    codes = getattr(tokenizer, "lang_code_to_id", None) or filter(
        _LANGUAGE.fullmatch, (one.strip("_") for one in added)
    )
    found: dict[str, int] = {}
    for name in (code.strip("_") for code in codes):
        for token in (f"__{name}__", name):
            id = tokenizer.convert_tokens_to_ids(token)
            if id is not None and id != tokenizer.unk_token_id:
                found.setdefault(name, int(id))
    return found


def language_id(tokenizer: Any, setting: str, name: str, checkpoint: str) -> int:
    """The id of the token of a language; `setting` names it with its place. Raises UsageError if there is none."""
    languages = languages_of(tokenizer)
    if not languages:
        raise UsageError(f"{setting}: the tokenizer of {checkpoint} has no languages")
    if name not in languages:
        hint = f"its languages are {', '.join(sorted(languages))}"
        raise UsageError(f"{setting}: {checkpoint} has no language {quote(name)}", hint=hint)
    return languages[name]


@contextmanager
def reading(tokenizer: Any, language: str | None) -> Iterator[None]:
    """Read texts in this context as `language`; None: as the tokenizer's own."""
    if language is None:
        yield
        return
    before, tokenizer.src_lang = tokenizer.src_lang, language
    try:
        yield
    finally:
        tokenizer.src_lang = before

"""How large a vocabulary may be, counted in the files before a library reads them.

Libraries build tables of a vocabulary that are far larger than its files: an automaton that finds added tokens, 80
bytes for each byte of their text; a trie of a Unigram vocabulary, up to 340 bytes for each byte of its pieces that no
other piece begins with; and dictionaries of all tokens and merges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from genctl.errors import ModelError

MOST_TOKENS = 1 << 20  # XLM-V has 901,629, and no other published vocabulary more than half of them
MOST_MERGES = 1 << 21  # Gemma 3 has 514,906
MOST_ADDED = 1 << 22  # bytes of all added tokens: 200,000 of usual length
MOST_PREFIXES = 1 << 22  # bytes of a Unigram vocabulary, what pieces share counted once
MOST_LISTED = 1 << 16  # special tokens in a list
ADDED = (3, 4)  # the types of control and user-defined tokens, which become added tokens
_BPE = 2  # of SentencePiece, whose default is 1, Unigram
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_LINES = ("merges.txt", "vocab.txt", "tiktoken.model")  # one entry on each line
_PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "source.spm",
           "target.spm")  # fmt: skip


def check_json(name: str, data: dict[str, Any]) -> None:
    """Raises ModelError for a JSON file of a tokenizer with more than the bounds above."""
    if name == "tokenizer.json":
        model: Any = data["model"] if isinstance(data.get("model"), dict) else {}
        vocabulary, added = model.get("vocab") or (), data.get("added_tokens") or ()
        tokens, merges = _count(vocabulary) + _count(added), _count(model.get("merges"))
        check(name, tokens=tokens, merges=merges, added=_letters(added))
        if isinstance(vocabulary, list):
            check_unigram(name, (str(entry[0]) for entry in vocabulary if isinstance(entry, list) and entry))
    elif name in ("vocab.json", "added_tokens.json"):
        check(name, tokens=len(data), added=sum(map(size, data)) if name == "added_tokens.json" else 0)
    elif name == "tekken.json":
        special = data.get("special_tokens")
        check(name, tokens=_count(data.get("vocab")) + _count(special), added=_letters(special))
    else:
        for key in _LISTS:
            if _count(data.get(key)) > MOST_LISTED:
                raise _too_many(name, "special tokens in a list", _count(data[key]), MOST_LISTED)
        parts = {key: value for key, value in data.items() if key != "chat_template"}
        check(name, tokens=_count(data.get("added_tokens_decoder")), added=_letters(parts))


def check_others(folder: Path) -> None:
    """Raises ModelError for a list of tokens or merges, or a SentencePiece model, with more than the bounds above.

    A tokenizer.json is read in the place of a SentencePiece model, and holds the same.
    """
    names = _LINES if (folder / "tokenizer.json").is_file() else (*_LINES, *_PIECES)
    for path in (folder / name for name in names if (folder / name).is_file()):
        name = path.name
        content = path.read_bytes()  # `check_files` bounds it
        if name in _PIECES and content[:1] == b"\n":
            _check_pieces(name, content)
        elif name == "merges.txt":
            check(name, merges=content.count(b"\n"))
        else:
            check(name, tokens=content.count(b"\n"))


def check(name: str, *, tokens: int = 0, merges: int = 0, added: int = 0) -> None:
    """Raises ModelError for more tokens, merges or bytes of added tokens than any tokenizer has."""
    for what, number, most in (
        ("tokens", tokens, MOST_TOKENS),
        ("merges", merges, MOST_MERGES),
        ("bytes of added tokens", added, MOST_ADDED),
    ):
        if number > most:
            raise _too_many(name, what, number, most)


def check_unigram(name: str, pieces: Iterable[str | bytes]) -> None:
    """Raises ModelError for pieces whose trie is larger than that of any vocabulary."""
    listed = [piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece for piece in pieces]
    letters = sum(map(len, listed))
    if letters > MOST_PREFIXES:
        listed.sort()
        letters -= sum(_shared(*pair) for pair in pairwise(listed))
    if letters > MOST_PREFIXES:
        raise _too_many(name, "bytes of pieces", letters, MOST_PREFIXES)


def size(text: str) -> int:
    """The bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _shared(one: bytes, other: bytes) -> int:
    """How many bytes two pieces begin with alike."""
    differs = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differs, min(len(one), len(other)))


def _too_many(name: str, what: str, number: int, most: int) -> ModelError:
    return ModelError(f"{name} has {number:,} {what}, and at most {most:,} are read")


def _count(value: Any) -> int:
    return len(value) if isinstance(value, (list, dict)) else 0


def _letters(value: Any) -> int:
    """The bytes of all strings in a value; those of keys do not count."""
    letters, waiting = 0, [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            letters += size(value)
        elif isinstance(value, (list, dict)):
            waiting += value.values() if isinstance(value, dict) else value
    return letters


def _check_pieces(name: str, content: bytes) -> None:
    """A SentencePiece model: pieces (field 1: text 1, type 3), then the specification of its training (field 2)."""
    added, kind, listed = 0, 1, []
    for field, value in _fields(content):
        if field == 1 and isinstance(value, bytes):
            parts = dict(_fields(value))
            text = parts.get(1, b"")
            listed.append(text if isinstance(text, bytes) else b"")
            added += len(listed[-1]) if parts.get(3) in ADDED else 0
            check(name, tokens=len(listed), added=added)
        elif field == 2 and isinstance(value, bytes):
            kind = next((each for number, each in _fields(value) if number == 3 and isinstance(each, int)), 1)
    if kind != _BPE:
        check_unigram(name, listed)


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in the encoding of Protocol Buffers, up to one that is damaged."""
    at = 0
    while at < len(content):
        key, at = _number(content, at)
        kind = key & 7
        if kind == 0:
            value, at = _number(content, at)
            yield key >> 3, value
            continue
        length, at = _number(content, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, len(content)), at)
        if at + length > len(content):
            return
        yield key >> 3, content[at : at + length]
        at += length


def _number(content: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and the place behind it."""
    value = 0
    for place in range(10):
        if at + place >= len(content):
            break
        byte = content[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    return value, len(content)

"""Bounds on the files of a tokenizer, checked before a library reads them.

The library (github.com/huggingface/tokenizers) allocates what a file claims, makes tables of added tokens and Unigram
pieces that are up to 340 times as large as their text, and aborts the process if memory runs out. So counts, lengths
and ids have bounds that no published tokenizer comes near. The library refuses all other errors itself.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from genctl.errors import ModelError
from genctl.models.weights import read_json, shown

MOST_TOKENS = 1 << 20  # no published vocabulary of a model that writes texts has half of them
MOST_MERGES = 1 << 21  # Gemma 3 has 514,906
MOST_ADDED = 1 << 22  # bytes of all added tokens: 200,000 of usual length
MOST_PIECES = 1 << 22  # bytes of a Unigram vocabulary; mT5's has half of them
LARGEST_LIST = 1 << 23  # bytes of a file that is not JSON; Gemma's tokenizer.model has half of them
MOST_IDS = 1 << 24
MOST_COUNTED = 1 << 16  # special tokens in a list, tokens that a class creates, tokens of padding
MOST_GROWTH, MOST_REPEATS = 1000, 16  # times, of a text: by all steps of a part, and by templates
LONGEST_STRING = 1000  # characters of a string in a step of the tokenizer
LONGEST_LIST = 256  # items of a list in a step
_LONGER = {"Regex": 1 << 16, "precompiled_charsmap": 1 << 24}  # strings that no step inserts
_CHARSMAP_GROWTH = 20  # NFKC makes at most 18 characters of one (unicode.org/reports/tr15)

SPECIAL_TYPES = (2, 3, 4)  # unknown, control and user-defined tokens of a GGUF file, which become added tokens
_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json", "special_tokens_map.json",
          "tekken.json")  # fmt: skip
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
LISTS = ("merges.txt", "vocab.txt", "tiktoken.model")
SENTENCEPIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "source.spm",
                  "target.spm")  # fmt: skip


@lru_cache(maxsize=1)  # large files take half a second
def _parsed(path: Path, size: int, modified: int) -> dict[str, Any]:
    return read_json(path, path.name)


def parsed(path: Path) -> dict[str, Any]:
    """tokenizer.json, which stays in memory until `forget`."""
    state = path.stat()
    return _parsed(path, state.st_size, state.st_mtime_ns)


forget = _parsed.cache_clear


def check(folder: Path) -> None:
    """Raises ModelError for a tokenizer file that is not JSON, or that implies more than any tokenizer needs."""
    # a tokenizer.json is read in place of a SentencePiece model
    for name in LISTS if (folder / "tokenizer.json").is_file() else (*LISTS, *SENTENCEPIECES):
        if (folder / name).is_file():
            _at_most(name, "bytes", (folder / name).stat().st_size, LARGEST_LIST)
    for name in _FILES:
        path = folder / name
        if path.is_file():
            _check_file(name, parsed(path) if name == "tokenizer.json" else read_json(path, name))


def _check_file(name: str, data: dict[str, Any]) -> None:
    """One JSON file: a vocabulary, added tokens, and settings, as far as it has them."""
    model: dict[str, Any] = data["model"] if isinstance(data.get("model"), dict) else {}
    vocabulary: Any = model.get("vocab", data.get("vocab"))  # of tokenizer.json, of tekken.json
    added: Any = data.get("added_tokens", data.get("special_tokens"))
    tokens = _count(vocabulary) + _count(added)
    ids = [token.get("id") for token in _objects(added)]
    if name in ("vocab.json", "added_tokens.json"):
        vocabulary, tokens, added = data, len(data), list(data) if name == "added_tokens.json" else None
    elif name in ("tokenizer_config.json", "special_tokens_map.json"):
        vocabulary, added = data.get("added_tokens_decoder"), {**data, "chat_template": None}
        tokens, numbers = _count(vocabulary), vocabulary if isinstance(vocabulary, dict) else ()
        ids = [int(number[:9]) for number in numbers if number.isdecimal()]
        _check_counts(name, added)
        for key in ("extra_special_tokens", "additional_special_tokens"):
            _at_most(name, "special tokens in a list", _count(data.get(key)), MOST_COUNTED)
    else:
        _check_counts(name, data.get("padding"))
        _check_steps({**data, "model": {**model, "vocab": None, "merges": None}})
    pieces = _bytes(vocabulary) if isinstance(vocabulary, list) and model else 0
    check_vocabulary(name, tokens=tokens, merges=_count(model.get("merges")), added=_bytes(added), pieces=pieces)
    for id in (*ids, *(vocabulary.values() if isinstance(vocabulary, dict) else ())):
        if isinstance(id, int) and id >= MOST_IDS:
            raise ModelError(f"{name} holds the id {id!s:.30}, far above what any model has")


def check_vocabulary(name: str, *, tokens: int = 0, merges: int = 0, added: int = 0, pieces: int = 0) -> None:
    """Raises ModelError for a vocabulary above the bounds.

    `added` is the length of all added tokens in bytes, `pieces` that of a Unigram vocabulary.
    """
    _at_most(name, "tokens", tokens, MOST_TOKENS)
    _at_most(name, "merges", merges, MOST_MERGES)
    _at_most(name, "bytes of added tokens", added, MOST_ADDED)
    _at_most(name, "bytes of pieces", pieces, MOST_PIECES)


def check_charsmap(name: str, data: bytes) -> None:
    """The trie of a SentencePiece normaliser: 4 bytes with its length in bytes, little endian, then the bytes.

    Raises ModelError, with the `name` of its file.
    """
    length = int.from_bytes(data[:4], "little")
    if data and (length > len(data) - 4 or length % 4):
        raise ModelError(f"{name}: its precompiled_charsmap is damaged")


def _at_most(name: str, what: str, number: int, most: int) -> None:
    if number > most:
        raise ModelError(f"{name} has {number:,} {what}, and at most {most:,} are read")


def _check_counts(name: str, settings: Any) -> None:
    """Numbers that are neither ids nor lengths of texts: `extra_ids`, `offset`, the length of padding."""
    for key, value in (item for entries in _objects(settings) for item in entries.items()):
        counts = not (key.endswith("id") or "max" in key or "length" in key)
        if type(value) in (int, float) and value > MOST_COUNTED and counts:
            raise ModelError(f"{name} says {shown(key, 40)} = {value!s:.30}, far above what any has")


def _check_steps(parts: dict[str, Any]) -> None:
    """The steps through which a text goes, each an object: a step may insert a string at every character."""
    for part in ("model", *_STEPS):
        growth = 1
        for step in _objects(parts.get(part)):
            for key, value in step.items():
                for text in value if isinstance(value, list) else [value]:
                    if isinstance(text, str) and len(text) > _LONGER.get(key, LONGEST_STRING):
                        what = f"{part}.{shown(key, 40)} has {len(text):,} characters"
                        raise ModelError(f"tokenizer.json: {what}, far more than any tokenizer's")
                if isinstance(value, list) and len(value) > LONGEST_LIST:
                    what = f"{part}.{shown(key, 40)} has {len(value):,} items"
                    raise ModelError(f"tokenizer.json: {what}, far more than any tokenizer's")
            growth *= _growth(step)
        most = MOST_REPEATS if part == "post_processor" else MOST_GROWTH
        if growth > most:
            raise ModelError(f"tokenizer.json: its {part} makes texts more than {most:,} times as long")


def _growth(step: dict[str, Any]) -> int:
    """How many times longer a step makes a text, at most; 1 if it only shortens it."""
    if "precompiled_charsmap" in step:
        with suppress(TypeError, ValueError, binascii.Error):  # the library reports it
            check_charsmap("tokenizer.json", base64.b64decode(step["precompiled_charsmap"] or "", validate=True))
        return _CHARSMAP_GROWTH
    if isinstance(step.get("single"), list):
        return max(1, sum("Sequence" in piece for piece in step["single"] if isinstance(piece, dict)))
    inserted = step.get("prepend", step.get("content"))
    return max(1, len(inserted)) + ("prepend" in step) if isinstance(inserted, str) else 1


def _nested(value: Any) -> Iterator[Any]:
    """A JSON value and every value inside it; keys do not count."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, (list, dict)):
            waiting += value.values() if isinstance(value, dict) else value


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    return (each for each in _nested(value) if isinstance(each, dict))


def _bytes(value: Any) -> int:
    """The bytes of all strings in a value, in UTF-8."""
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in _nested(value) if isinstance(text, str))


def _count(value: Any) -> int:
    return len(value) if isinstance(value, (list, dict)) else 0

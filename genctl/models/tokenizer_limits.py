"""Bounds on the files of a tokenizer, checked before a library reads them.

The library (github.com/huggingface/tokenizers) allocates what a file claims, makes tables of added tokens and Unigram
pieces that are up to 340 times as large as their text, and aborts the process if memory runs out. So counts, lengths
and ids have bounds that no published tokenizer comes near. The library refuses all other errors itself.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from genctl.errors import ModelError
from genctl.models.weights import read_json, shown

MOST_TOKENS = 1 << 20  # more than twice the largest published vocabulary of a text model
MOST_MERGES = 1 << 21  # Gemma 3 has 514,906
MOST_ADDED = 1 << 22  # bytes of all added tokens and settings: 200,000 tokens of usual length
MOST_PIECES = 1 << 22  # bytes of a Unigram vocabulary; mT5's has half of this
LARGEST_LIST = 1 << 23  # bytes of a file that is not JSON; Gemma's tokenizer.model has half of this
MOST_IDS = 1 << 24
MOST_COUNTED = 1 << 16  # tokens that a class creates, or padding tokens
MOST_GROWTH = 100  # factor by which all steps of a part may lengthen a text

SPECIAL_TYPES = (2, 3, 4)  # unknown, control and user-defined tokens of a GGUF file, which become added tokens
_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json", "special_tokens_map.json",
          "tekken.json")  # fmt: skip
_LISTED = ("added_tokens", "special_tokens", "added_tokens_decoder")  # the added tokens of each of these files
_NO_COUNT = re.compile("max|length|vocab|index")
_STEPS = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder")
_INSERTED = ("prepend", "content", "end_of_word_suffix", "continuing_subword_prefix", "single", "ids")
LISTS = ("merges.txt", "vocab.txt", "tiktoken.model")
SENTENCEPIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "source.spm",
                  "target.spm")  # fmt: skip


@lru_cache(maxsize=1)  # large files take half a second
def parsed(path: Path) -> dict[str, Any]:
    """tokenizer.json, cached until `forget`."""
    return read_json(path, path.name)


forget = parsed.cache_clear


def check(folder: Path) -> None:
    """Raises ModelError for a tokenizer file that is not JSON, or that implies more than any tokenizer needs."""
    forget()
    # a tokenizer.json is read in place of a SentencePiece model
    for name in LISTS if (folder / "tokenizer.json").is_file() else (*LISTS, *SENTENCEPIECES):
        if (folder / name).is_file():
            _at_most(name, "bytes", (folder / name).stat().st_size, LARGEST_LIST)
    for name in _FILES:
        if (folder / name).is_file():
            _check_file(name, parsed(folder / name) if name == "tokenizer.json" else read_json(folder / name, name))


def _check_file(name: str, data: dict[str, Any]) -> None:
    """Check a JSON file: its vocabulary, added tokens and settings, if it has them."""
    model: dict[str, Any] = data["model"] if isinstance(data.get("model"), dict) else {}
    vocabulary: Any = model.get("vocab", data.get("vocab"))  # of tokenizer.json, of tekken.json
    listed = next((data[key] for key in _LISTED if key in data), None)
    rest: Any = {**data, "vocab": None, "chat_template": None, "model": {**model, "vocab": None, "merges": None}}
    if name in ("vocab.json", "added_tokens.json"):
        vocabulary, listed, rest = data, None, list(data) if name == "added_tokens.json" else None
    check_vocabulary(
        name,
        tokens=_count(vocabulary) + _count(listed),
        merges=_count(model.get("merges")),
        added=_bytes(rest),
        pieces=_bytes(vocabulary) if isinstance(vocabulary, list) and model else 0,
    )
    ids: list[Any] = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [int(key[:9]) for key in listed if key.isdecimal()] if isinstance(listed, dict) else []
    for key, value in (item for each in _objects(rest) for item in each.items()):
        if key.endswith("id"):
            ids.append(value)
        elif type(value) in (int, float) and value > MOST_COUNTED and not _NO_COUNT.search(key):
            raise ModelError(f"{name} says {shown(key, 40)} = {value!s:.30}, far above what any has")
    if (largest := max((id for id in ids if isinstance(id, int)), default=0)) >= MOST_IDS:
        raise ModelError(f"{name} holds the id {largest!s:.30}, far above what any model has")
    for part in _STEPS if name == "tokenizer.json" else ():
        _check_steps(part, data.get(part) if part != "model" else rest["model"])


def check_vocabulary(name: str, *, tokens: int = 0, merges: int = 0, added: int = 0, pieces: int = 0) -> None:
    """Raises ModelError for a vocabulary above the bounds.

    `added` is the length of all added tokens in bytes, `pieces` that of a Unigram vocabulary.
    """
    _at_most(name, "tokens", tokens, MOST_TOKENS)
    _at_most(name, "merges", merges, MOST_MERGES)
    _at_most(name, "bytes of added tokens and settings", added, MOST_ADDED)
    _at_most(name, "bytes of pieces", pieces, MOST_PIECES)


def check_charsmap(name: str, data: bytes) -> None:
    """Check the trie of a SentencePiece normaliser: 4 bytes with its length in bytes, little endian, then the bytes.

    Raises ModelError, which names the file.
    """
    length = int.from_bytes(data[:4], "little")
    if data and (length > len(data) - 4 or length % 4):
        raise ModelError(f"{name}: its precompiled_charsmap is damaged")


def _at_most(name: str, what: str, number: int, most: int) -> None:
    if number > most:
        raise ModelError(f"{name} has {number:,} {what}, and at most {most:,} are read")


def _check_steps(part: str, steps: Any) -> None:
    """Check the steps of a part of tokenizer.json: each may insert a string or a list at every character of a text."""
    growth = 1
    for step in _objects(steps):
        for key in _INSERTED:
            if isinstance(step.get(key), (str, list)):
                growth *= max(1, len(step[key]) + (key == "prepend"))
        if isinstance(charsmap := step.get("precompiled_charsmap"), str):
            with suppress(ValueError):  # the library reports it
                check_charsmap("tokenizer.json", base64.b64decode(charsmap, validate=True))
    if growth > MOST_GROWTH:
        raise ModelError(f"tokenizer.json: its {part} makes texts more than {MOST_GROWTH} times as long")


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

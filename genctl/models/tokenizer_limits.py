"""Limits on the files of a tokenizer, checked before a library reads them.

The library (github.com/huggingface/tokenizers) allocates sizes from a file unchecked, and aborts the process without a
report if memory runs out. It also builds tables that are far larger than the files: an automaton that finds added
tokens takes 80 bytes for each byte of their text, a trie of a Unigram vocabulary up to 340 bytes for each byte of its
pieces. It refuses all other errors itself.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from genctl.errors import ModelError
from genctl.models.weights import read_json, shown

MOST_TOKENS = 1 << 20  # no published vocabulary of a model that writes texts has half of them
MOST_MERGES = 1 << 21  # Gemma 3 has 514,906
MOST_ADDED = 1 << 22  # bytes of all added tokens: 200,000 of usual length
MOST_PIECES = 1 << 22  # bytes of a Unigram vocabulary; mT5's has half of them
MOST_LISTED = 1 << 16  # special tokens in a list
LARGEST_LIST = 1 << 23  # bytes of a file that is not JSON; Gemma's tokenizer.model has half of them
MOST_IDS = 1 << 24
MOST_PADDING = 1 << 20  # tokens
MOST_COUNTED = 1 << 16  # tokens that a count in tokenizer_config.json creates
MOST_GROWTH = 1000  # times, of a text that is normalised or decoded; 3 is usual
MOST_REPEATS = 16  # of a text by a post-processor; 1 is usual
MOST_INSERTED = 1 << 12  # special tokens that a post-processor adds to a text
LONGEST_STRING = 1000  # characters of a string that a step of the tokenizer inserts
_LONGER = {"Regex": 1 << 16, "precompiled_charsmap": 1 << 24}  # strings that are not inserted
_CHARSMAP_GROWTH = 20  # NFKC makes at most 18 characters of one (unicode.org/reports/tr15)

SPECIAL_TYPES = (2, 3, 4)  # unknown, control and user-defined tokens of a GGUF file, which become added tokens
_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json", "special_tokens_map.json",
          "tekken.json")  # fmt: skip
LISTS = ("merges.txt", "vocab.txt", "tiktoken.model")
SENTENCEPIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "source.spm",
                  "target.spm")  # fmt: skip
_PARSED: list[tuple[str, int, int, dict[str, Any]]] = []  # at most one file


def check(folder: Path) -> None:
    """Raises ModelError for a tokenizer file that is not JSON, or that implies more than any tokenizer needs."""
    # a tokenizer.json is read in place of a SentencePiece model
    for name in LISTS if (folder / "tokenizer.json").is_file() else (*LISTS, *SENTENCEPIECES):
        if (folder / name).is_file():
            _check_number(name, "bytes", (folder / name).stat().st_size, LARGEST_LIST)
    for name in _FILES:
        if not (folder / name).is_file():
            continue
        data = read_json(folder / name, name)
        if name == "tokenizer.json":
            state = (folder / name).stat()
            _PARSED[:] = [(str(folder / name), state.st_size, state.st_mtime_ns, data)]
            _check_tokenizer(data)
        elif name in ("vocab.json", "added_tokens.json"):
            check_vocabulary(name, tokens=len(data), added=_bytes(list(data)) if name == "added_tokens.json" else 0)
            _check_ids(name, data.items())
        elif name == "tekken.json":
            special = data.get("special_tokens")
            check_vocabulary(name, tokens=_count(data.get("vocab")) + _count(special), added=_bytes(special))
        else:
            _check_settings(name, data)


def take(path: Path) -> dict[str, Any]:
    """tokenizer.json as `check` parsed it, or parsed again: large files take half a second. Frees the parsed file."""
    state = path.stat()
    parsed = [data for name, *stamp, data in _PARSED if (name, *stamp) == (str(path), state.st_size, state.st_mtime_ns)]
    forget()
    return parsed[0] if parsed else read_json(path, path.name)


def forget() -> None:
    """Free what `check` parsed."""
    _PARSED.clear()


def check_vocabulary(name: str, *, tokens: int = 0, merges: int = 0, added: int = 0, pieces: int = 0) -> None:
    """Raises ModelError for a vocabulary above the limits.

    `added` is the length of all added tokens in bytes, `pieces` that of a Unigram vocabulary.
    """
    _check_number(name, "tokens", tokens, MOST_TOKENS)
    _check_number(name, "merges", merges, MOST_MERGES)
    _check_number(name, "bytes of added tokens", added, MOST_ADDED)
    _check_number(name, "bytes of pieces", pieces, MOST_PIECES)


def check_charsmap(name: str, data: bytes) -> None:
    """The trie of a SentencePiece normaliser: 4 bytes with its length in bytes, little endian, then the bytes.

    Raises ModelError, with the `name` of its file.
    """
    length = int.from_bytes(data[:4], "little")
    if data and (length > len(data) - 4 or length % 4):
        raise ModelError(f"{name}: its precompiled_charsmap is damaged")


def _check_number(name: str, what: str, number: int, most: int) -> None:
    if number > most:
        raise ModelError(f"{name} has {number:,} {what}, and at most {most:,} are read")


def _check_ids(name: str, ids: Iterable[tuple[str, Any]]) -> None:
    for token, number in ids:
        if isinstance(number, int) and number >= MOST_IDS:
            raise ModelError(f"{name}: token {shown(token, 40)} has id {number!s:.30}, far above what any model has")


def _check_settings(name: str, data: dict[str, Any]) -> None:
    """tokenizer_config.json or special_tokens_map.json."""
    for key in ("extra_special_tokens", "additional_special_tokens"):
        _check_number(name, "special tokens in a list", _count(data.get(key)), MOST_LISTED)
    decoder = data.get("added_tokens_decoder")
    parts = [value for key, value in data.items() if key != "chat_template"]
    check_vocabulary(name, tokens=_count(decoder), added=_bytes(parts))
    if name != "tokenizer_config.json":
        return
    for id_ in decoder if isinstance(decoder, dict) else ():
        if id_.isdecimal() and (len(id_) > 8 or int(id_) >= MOST_IDS):
            raise ModelError(f"{name}: token {shown(id_, 40)} has an id far above what any model has")
    for key, value in data.items():  # tokens that a class creates (`extra_ids`, `offset`); lengths may have any size
        if type(value) in (int, float) and value > MOST_COUNTED and "max" not in key and "length" not in key:
            raise ModelError(f"{name} says {shown(key, 40)} = {value!s:.30}, far above what any has")


def _check_tokenizer(data: dict[str, Any]) -> None:
    """tokenizer.json: its vocabulary, its ids, its padding, and the steps through which a text goes."""
    name = "tokenizer.json"
    model: dict[str, Any] = data["model"] if isinstance(data.get("model"), dict) else {}
    vocabulary, added = model.get("vocab"), data.get("added_tokens")
    pieces = (
        [entry[0] for entry in vocabulary if isinstance(entry, list) and entry] if isinstance(vocabulary, list) else []
    )
    check_vocabulary(
        name,
        tokens=_count(vocabulary) + _count(added),
        merges=_count(model.get("merges")),
        added=_bytes(added),
        pieces=_bytes(pieces),
    )
    if isinstance(vocabulary, dict):
        _check_ids(name, vocabulary.items())
    _check_ids(name, ((str(token.get("content")), token.get("id")) for token in _objects(added)))
    for settings in _objects(data.get("padding")):
        for length in (settings.get("Fixed"), settings.get("pad_to_multiple_of")):
            if isinstance(length, (int, float)) and length > MOST_PADDING:
                raise ModelError(f"{name}: pads to {length!s:.30} tokens, far above what any model reads")
    inserted = {key: model.get(key) for key in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")}
    _check_strings("model", inserted)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        _check_strings(part, data.get(part))
    for part in ("normalizer", "decoder"):
        if sum(math.log(_growth(step)) for step in _objects(data.get(part))) > math.log(MOST_GROWTH):
            raise ModelError(f"{name}: its {part} makes texts more than {MOST_GROWTH:,} times as long")
    _check_templates(data.get("post_processor"))


def _check_strings(part: str, steps: Any) -> None:
    """Refuse long strings in the steps of a tokenizer: a step may insert one at every character."""
    for step in _objects(steps):
        for key, value in step.items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and len(text) > _LONGER.get(key, LONGEST_STRING):
                    problem = f"{part}.{shown(key, 40)} has {len(text):,} characters"
                    raise ModelError(f"tokenizer.json: {problem}, far more than any tokenizer's")


def _growth(step: dict[str, Any]) -> int:
    """How many times longer one step of a normaliser or a decoder makes a text, at most; 1 if it only shortens it."""
    if "precompiled_charsmap" in step:
        with suppress(TypeError, ValueError, binascii.Error):  # the library reports it
            check_charsmap("tokenizer.json", base64.b64decode(step["precompiled_charsmap"] or "", validate=True))
        return _CHARSMAP_GROWTH
    if isinstance(step.get("prepend"), str):
        return len(step["prepend"]) + 1
    pattern, content = step.get("pattern"), step.get("content")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    least = len(replaced) if isinstance(replaced, str) and replaced else 1
    return max(1, -(-len(content) // least)) if isinstance(content, str) else 1


def _check_templates(post_processor: Any) -> None:
    """Refuse templates that together repeat a text many times, or add many tokens to it."""
    repeats, inserted = 1, 0
    for template in _objects(post_processor):
        pieces = template.get("single")
        if not isinstance(pieces, list):
            continue
        repeats *= max(1, sum("Sequence" in piece for piece in pieces if isinstance(piece, dict)))
        inserted += len(pieces) * max((_count(token.get("ids")) for token in _objects(template)), default=1)
        if repeats > MOST_REPEATS:
            raise ModelError(f"tokenizer.json: its post_processor repeats texts more than {MOST_REPEATS} times")
        if inserted > MOST_INSERTED:
            raise ModelError(f"tokenizer.json: its post_processor adds more than {MOST_INSERTED:,} tokens to a text")


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

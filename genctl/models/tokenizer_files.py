"""Checks of a tokenizer's files before a library reads them: numbers in them become sizes without a check.

The library (github.com/huggingface/tokenizers) allocates sizes from a file unchecked and aborts the process if memory
runs out, without a report. It refuses all other errors itself.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from genctl.errors import ModelError
from genctl.models import sizes
from genctl.models.architectures import BACKEND as BACKEND
from genctl.models.architectures import LEFT_TO_TRANSFORMERS, NO_CLASS, facts_of
from genctl.models.weights import read_json, shown

# -- the class that transformers' `AutoTokenizer` uses for a checkpoint folder, by the rules of version 5 --------------
# tokenizer_config.json or config.json may name a class, and each model type has a registered one. Since version 5 a
# class rebuilds parts of the tokenizer instead of taking them from tokenizer.json (`tokenizer_recipes`); all other
# folders use tokenizer.json unchanged, which is called `BACKEND` here.


# Names of that class, and of classes that it replaces.
_BACKENDS = frozenset({BACKEND, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "PythonBackend", "BloomTokenizer"})
CLASSES = frozenset({"GPT2Tokenizer", "GPTNeoXTokenizer", "GemmaTokenizer", "LlamaTokenizer", "Qwen2Tokenizer"})

# Paths as they are given, in lower case, of checkpoints whose tokenizer.json is taken as it is.
NAMES_OF_BACKENDS = (
    "deepseek-ai/deepseek-r1-distill-llama-*", "deepseek-ai/deepseek-coder-*", "allenai/dolma2-tokenizer",
    "google/umt5-small", "naver-clova-ix/donut-*", "salesforce/blip2-opt-*", "salesforce/blip2-flan-t5-*",
    "salesforce/instructblip-flan-t5-*", "stepfun-ai/step-3.7-*",
)  # fmt: skip


class UnsupportedTokenizer(Exception):
    """Why a tokenizer is left to transformers."""


def class_of(
    place: str, config: dict[str, Any], tokenizer_config: dict[str, Any], *, byte_level: Callable[[], bool]
) -> str:
    """`BACKEND` or one of `CLASSES`. `byte_level` returns whether tokenizer.json has a ByteLevel part.

    Raises UnsupportedTokenizer for any other class.
    """
    model_type = config.get("model_type")
    facts = facts_of(model_type)
    if facts.tokenizer in ("", LEFT_TO_TRANSFORMERS):
        raise UnsupportedTokenizer(f"model type {model_type!r:.40} has rules of its own")
    if tokenizer_config.get("auto_map") is not None or "model_name" in config:
        raise UnsupportedTokenizer("its class may be another than the one that is named")
    if any(fnmatch(place.lower(), name) for name in NAMES_OF_BACKENDS):
        return BACKEND
    class_name = tokenizer_config.get("tokenizer_class")
    class_name = config.get("tokenizer_class") if class_name is None else class_name
    if class_name is not None and (not isinstance(class_name, str) or not class_name):
        raise UnsupportedTokenizer(f"tokenizer_class = {class_name!r:.40}")
    name, registered = class_name, None if facts.tokenizer == NO_CLASS else facts.tokenizer
    if name is None:
        name = registered or BACKEND
    else:
        name = name.removesuffix("Fast")
        if name == "LlamaTokenizer" and not facts.tokenizer_wins and not facts.reads_tekken and byte_level():
            return BACKEND
        if registered is not None and (registered == BACKEND or facts.tokenizer_wins):
            name = registered
    if name in _BACKENDS:
        return BACKEND
    if name not in CLASSES:
        raise UnsupportedTokenizer(f"{name:.60} is not known to genctl")
    return str(name)


MOST_IDS = 1 << 24  # far more than any published vocabulary
MOST_PADDING = 1 << 20  # tokens
MOST_COUNTED = 1 << 16  # tokens that a count in tokenizer_config.json creates
MOST_GROWTH = 1000  # times, of a text that is normalised or decoded; 3 is usual
MOST_REPEATS = 16  # of a text by a post-processor; 1 is usual
MOST_ADDED = 1 << 12  # special tokens that a post-processor adds to a text
LONGEST_STRING = 1000  # characters of a string that a step of the tokenizer inserts
LONGEST_PATTERN = 1 << 16  # characters of a regular expression; 500 is long
_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json", "special_tokens_map.json",
          "tekken.json")  # fmt: skip
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_OF_MODEL = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")
_PARSED: list[tuple[str, int, int, dict[str, Any]]] = []  # at most one file
_CHARSMAP_GROWTH = 20  # NFKC makes at most 18 characters of one (unicode.org/reports/tr15)


def check(folder: Path) -> None:
    """Raises ModelError for a tokenizer file that is not JSON or that implies more than any tokenizer needs."""
    sizes.check_others(folder)
    for name in _FILES:
        if not (folder / name).is_file():
            continue
        data = read_json(folder / name, name)
        sizes.check_json(name, data)
        if name == "tokenizer.json":
            state = (folder / name).stat()
            _PARSED[:] = [(str(folder / name), state.st_size, state.st_mtime_ns, data)]
        if name in ("tekken.json", "special_tokens_map.json"):
            continue
        _check_ids(name, _ids(name, data))
        if name == "tokenizer_config.json":
            _check_counts(data)
        if name == "tokenizer.json":
            _check_padding(data.get("padding"))
            _check_strings(data)
            for part, inner in (("normalizer", "normalizers"), ("decoder", "decoders")):
                if (growth := _growth(data.get(part), inner)) > MOST_GROWTH:
                    raise ModelError(f"tokenizer.json: its {part} makes texts {growth:,} times as long")
            repeats, added = _repeats(data.get("post_processor"))
            if repeats > MOST_REPEATS:
                raise ModelError(f"tokenizer.json: its post_processor repeats texts {repeats:,} times")
            if added > MOST_ADDED:
                raise ModelError(f"tokenizer.json: its post_processor adds {added:,} tokens to a text")


def take(path: Path) -> dict[str, Any]:
    """tokenizer.json as `check` parsed it, or parsed again: large files take half a second. Frees the parsed file."""
    state = path.stat()
    parsed = [data for name, *stamp, data in _PARSED if (name, *stamp) == (str(path), state.st_size, state.st_mtime_ns)]
    forget()
    return parsed[0] if parsed else read_json(path, path.name)


def forget() -> None:
    """Free what `check` parsed."""
    _PARSED.clear()


def _ids(name: str, data: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each token and its id, wherever the file lists them."""
    if name == "tokenizer_config.json":
        tokens = data.get("added_tokens_decoder")
        for key in tokens if isinstance(tokens, dict) else ():
            # int() is slow for long numbers, and none of them is an id
            yield key, int(key) if key.isdecimal() and len(key) < 20 else None if not key.isdecimal() else MOST_IDS
        return
    if name != "tokenizer.json":
        yield from data.items()
        return
    model = data.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    added = data.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            yield str(token.get("content")), token.get("id")


def _check_ids(name: str, ids: Iterable[tuple[str, Any]]) -> None:
    for token, number in ids:
        if isinstance(number, int) and number >= MOST_IDS:
            raise ModelError(f"{name}: token {shown(token, 40)} has id {number!s:.30}, far above what any model has")


def _check_counts(settings: dict[str, Any]) -> None:
    """Refuse large counts of tokens that a class creates (`extra_ids`, `offset`); lengths may have any size."""
    for name, value in settings.items():
        if type(value) in (int, float) and value > MOST_COUNTED and "max" not in name and "length" not in name:
            raise ModelError(f"tokenizer_config.json says {shown(name, 40)} = {value!s:.30}, far above what any has")


def _check_padding(padding: Any) -> None:
    if not isinstance(padding, dict):
        return
    strategy = padding.get("strategy")
    fixed = strategy.get("Fixed") if isinstance(strategy, dict) else None
    for length in (fixed, padding.get("pad_to_multiple_of")):
        if isinstance(length, (int, float)) and length > MOST_PADDING:
            raise ModelError(f"tokenizer.json: pads to {length!s:.30} tokens, far above what any model reads")


def _check_strings(data: dict[str, Any]) -> None:
    """Refuse long strings in the steps of a tokenizer: a step may insert one at every character."""
    model = data.get("model")
    iterators = [_strings(data.get(part), part) for part in _STEPS]
    iterators += [_strings(model.get(name), f"model.{name}") for name in _OF_MODEL] if isinstance(model, dict) else []
    for where, text in (item for strings in iterators for item in strings):
        name = where.rpartition(".")[2]
        if name == "precompiled_charsmap":
            continue
        if len(text) > (LONGEST_PATTERN if name == "Regex" else LONGEST_STRING):
            raise ModelError(f"tokenizer.json: {where} has {len(text):,} characters, far more than any tokenizer's")


def _strings(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Each string in a value, with the names that lead to it."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(inner, f"{where}.{shown(key, 40)}")
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, where)


def _repeats(step: Any) -> tuple[int, int]:
    """How many times a post-processor repeats a text, and how many tokens it adds."""
    if not isinstance(step, dict):
        return 1, 0
    if isinstance(step.get("processors"), list):
        repeats, added = 1, 0
        for part in step["processors"]:
            times, more = _repeats(part)
            repeats, added = repeats * max(times, 1), added * max(times, 1) + more
            if repeats > MOST_REPEATS or added > MOST_ADDED:
                break
        return repeats, added
    pieces, tokens = step.get("single"), step.get("special_tokens")
    if not isinstance(pieces, list):
        return 1, 0
    ids = {}
    for name, token in tokens.items() if isinstance(tokens, dict) else ():
        held = token.get("ids") if isinstance(token, dict) else None
        ids[name] = len(held) if isinstance(held, list) else 1
    kinds = [piece for piece in pieces if isinstance(piece, dict)]
    special = [piece["SpecialToken"] for piece in kinds if isinstance(piece.get("SpecialToken"), dict)]
    added = sum(ids.get(str(token.get("id")), 1) for token in special)
    return sum("Sequence" in piece for piece in kinds), added


def _growth(step: Any, inner: str) -> int:
    """How many times longer a text may become, from the parts of a normaliser; steps that only shorten count 1."""
    if not isinstance(step, dict):
        return 1
    if isinstance(step.get(inner), list):
        growth = 1
        for part in step[inner]:
            growth *= _growth(part, inner)
            if growth > MOST_GROWTH:
                break
        return growth
    kind = step.get("type")
    if kind == "Precompiled":
        with suppress(TypeError, ValueError, binascii.Error):  # the library reports it
            check_charsmap("tokenizer.json", base64.b64decode(step.get("precompiled_charsmap") or "", validate=True))
        return _CHARSMAP_GROWTH
    if kind == "Prepend" and isinstance(step.get("prepend"), str):
        return len(step["prepend"]) + 1
    if kind == "Replace" and isinstance(step.get("content"), str):
        pattern = step.get("pattern")
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        return (
            -(-len(step["content"]) // max(len(replaced), 1))
            if isinstance(replaced, str)
            else max(len(step["content"]), 1)
        )
    return 1


def check_charsmap(name: str, data: bytes) -> None:
    """The trie of a SentencePiece normaliser: 4 bytes with its length in bytes, little endian, then the bytes.

    Raises ModelError, with the `name` of its file.
    """
    length = int.from_bytes(data[:4], "little")
    if data and (length > len(data) - 4 or length % 4):
        raise ModelError(f"{name}: its precompiled_charsmap is damaged")

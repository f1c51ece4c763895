"""How many tokens fit into a model; and numbers in config.json and sizes of vocabularies that no model can have.

The latter are refused before anything is built of them.

Sizes: libraries have more than a thousand names for numbers that become dimensions, so a number counts as a size unless
its name says otherwise. The bounds are generous: no published model comes near them, and a number within them costs
megabytes at most.

Angles of rotary positions: a base without a logarithm, a factor of 0 as a divisor, more features than a head has. The
native runtime and transformers' classes would fail on them, or compute NaN.

Vocabularies: libraries build tables of one that are far larger than its files: an automaton that finds added tokens, 80
bytes for each byte of their text; a trie of a Unigram vocabulary, up to 340 bytes for each byte of its pieces that no
other piece begins with; and dictionaries of all tokens and merges.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from genctl.errors import ModelError
from genctl.models.architectures import facts_of
from genctl.models.weights import shown

# -- how many tokens fit into a model, as its configuration says. Imports no torch and no transformers -----------------


_NAMES = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx")
_SOURCE_NAMES = ("max_source_positions", "max_encoder_position_embeddings", "max_position_embeddings", "n_positions")
_SCALINGS = ("rope_scaling", "rope_parameters")
_STRETCHED = ("linear", "yarn", "longrope", "su", "llama3", "proportional")  # kinds of scaling that have a factor
MOST_POSITIONS = 1 << 53  # of a scaled context: every reader of JSON keeps the number
_BEFORE = "original_max_position_embeddings"
_PARTS = ("decoder", "text_config")  # of a composite config.json: the part that writes texts


def context_of(config: Any) -> int | None:
    """The most tokens that a model or its decoder reads, as far as `generate()` does; None if nothing bounds them.

    Where rotary positions are scaled, texts may be longer than `trained_length`. `config` is a loaded configuration, or
    the fields of a config.json.
    """
    length = trained_length(config)
    return None if length is None else _scaled(length, _decoder(config))


def trained_length(config: Any) -> int | None:
    """The number of positions in a configuration; None if the model has no such limit."""
    kind = config.get("model_type") if isinstance(config, dict) else config.model_type
    return _limit(kind, _decoder(config), _NAMES)


def _decoder(config: Any) -> Any:
    """The part that writes texts, its fields as attributes."""
    if not isinstance(config, dict):
        return config.get_text_config(decoder=True)
    part = next((config[name] for name in _PARTS if isinstance(config.get(name), dict)), config)
    native = facts_of(part.get("model_type")).native
    default = {} if native is None else {"n_ctx": native.context}  # the last name: any other one wins
    return SimpleNamespace(**{**default, **part})


def _scaled(length: int, part: Any) -> int | None:
    """The context of a decoder with `length` positions in its configuration, and its scaling of rotary positions.

    Only layers that see the whole text count: a window bounds the distances in the others.
    """
    if hasattr(type(part), "rope_scaling") and not hasattr(type(part), "rope_parameters"):
        return length  # a class of transformers without rotary positions
    fields = vars(part)  # of transformers' classes rope_parameters alone, with one form for all files
    scaling, parameters = (fields.get(name) if isinstance(fields.get(name), dict) else {} for name in _SCALINGS)
    kinds = {name: entry for name, entry in parameters.items() if isinstance(entry, dict)}
    if kinds:
        if scaling:  # an older form
            kinds["full_attention"] = {**kinds.get("full_attention", {}), **scaling}
        whole = [entry for name, entry in kinds.items() if "sliding" not in name] or [{}]
        reaches = [_reach(length, entry, None, part) for entry in whole]
    else:
        reaches = [_reach(length, scaling or parameters, fields.get(_BEFORE), part)]
    return min((reach for reach in reaches if reach is not None), default=None)


def _reach(length: int, rope: dict[str, Any], original: object, part: Any) -> int | None:
    """How far one entry of `rope_parameters` reaches: its factor times the length before scaling."""
    kind, factor = str(rope.get("rope_type", rope.get("type"))), _number(rope, "factor")
    if "dynamic" in kind:
        return None
    before = next((one for one in (original, rope.get(_BEFORE)) if type(one) is int and one > 0), length)
    if factor is None and rope.get("long_factor") and before >= length:
        return None  # frequencies for longer texts, and nothing says how long
    published = facts_of(getattr(part, "model_type", None)).scaled_context == length
    if kind not in _STRETCHED or factor is None or not math.isfinite(factor) or published:
        return length
    return max(length, int(min(before * factor, MOST_POSITIONS)))


def source_context_of(config: Any) -> int | None:
    """The maximum number of tokens of an encoder; None if there is no limit. `config` is a loaded configuration."""
    own = getattr(config, "encoder", None) or config  # others than composites have one config for both sides
    return _limit(getattr(own, "model_type", None), own, _SOURCE_NAMES)


def _limit(model_type: object, part: Any, names: Sequence[str]) -> int | None:
    if facts_of(model_type).unbounded:
        return None
    values = (getattr(part, name, None) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


MOST = 1 << 16  # the largest size that is not a dimension of a tensor in the weight files
_DEEPEST = 8
# Not sizes: ids of tokens, lengths in tokens, samples and pixels, rates, seeds, and training parameters.
_OTHERWISE = re.compile(
    r".*(token|vocab|_ids?$|_index|offset|theta|base|length|position|context|window|chunk|floor|seed|rate|samples"
    r"|pixels|max_|min_|_max$|_min$|factor|version|budget|steps?$|hop|fft|image_size|budget|ctx|hash|period|threshold"
    r"|limit|bucket|distance|duration|frames|seconds|clip|param|bytes|flops|epoch|batch|timestamp|seen).*"
    r"|n_positions|pad_.*|.*_(ms|sec)"
)
_TABLE = re.compile(
    r".*(vocab|position|hash|bucket).*"
)  # rows of a table, many of which a checkpoint may keep in parts
MOST_ROWS = 1 << 20

_BASES = ("rope_theta", "rotary_emb_base", "rope_local_base_freq")
_SHARES = ("partial_rotary_factor", "rotary_pct", "rope_pct")


def check_sizes(
    config: dict[str, Any], widest: int, *, known: Collection[str] = (), source: str = "config.json"
) -> None:
    """Refuse sizes that no tensor has; `widest` is the largest dimension of any tensor. Raises ModelError.

    `known` are names with bounds of their own; `source` is what the message calls the place of the config.
    """
    for where, value in _sizes(config, ""):
        name = where.rpartition(".")[2]
        if name in known:
            continue
        most = max(MOST_ROWS, 64 * widest) if _OTHERWISE.fullmatch(name) else max(MOST, widest)
        if value > most:
            raise ModelError(f"{source} says {where} = {value!r:.40}, far above what any model has ({most:,})")


def _sizes(part: dict[str, Any], where: str) -> Iterator[tuple[str, int]]:
    """Each size with its name, including nested objects and lists."""
    if where.count(".") > _DEEPEST:
        return
    for key, value in part.items():
        name = f"{where}{shown(key, 60)}"
        if isinstance(value, dict):
            yield from _sizes(value, f"{name}.")
        elif _TABLE.fullmatch(key) or not _OTHERWISE.fullmatch(key):
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int or (isinstance(number, float) and number.is_integer()):
                    yield name, int(number)


def check_angles(config: dict[str, Any], where: str = "", source: str = "config.json") -> None:
    """`config` is config.json or a part of it. `where` is what its keys begin with in messages, `source` the file.

    Raises ModelError.
    """
    where = f"{source} says {where}"
    _check_fields(config, where)
    for name, entry in _entries(config):
        at = f"{where}{name}."
        _check_fields(entry, at)
        kind = entry.get("rope_type", entry.get("type"))
        base = _number(entry, "rope_theta")
        if base is None:
            base = _number(config, "rope_theta")
        if kind == "yarn" and "short_factor" not in entry:  # Phi-3 calls longrope so
            if base == 1:
                raise ModelError(f"{at}rope_type = yarn with rope_theta = 1, whose logarithm is 0")
            for field in ("beta_fast", "beta_slow"):
                if (_number(entry, field) or 0) < 0:
                    raise _angle_error(at, field, entry, "below 0")
        if kind == "llama3":
            _nonzero(entry, at, "low_freq_factor", "high_freq_factor")
        if kind in ("linear", "llama3", "yarn") and "short_factor" not in entry:
            _nonzero(entry, at, "factor")


def _check_fields(values: dict[str, Any], where: str) -> None:
    for name in _BASES:
        base = _number(values, name)
        if base is not None and not (0 < base < math.inf):
            raise _angle_error(where, name, values, "not a number above 0")
    for name in _SHARES:
        share = _number(values, name)
        if share is not None and not 0 <= share <= 1:
            raise _angle_error(where, name, values, "not between 0 and 1")


def _entries(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each description of angles: one for all layers, or one for each kind of layer."""
    for name in reversed(_SCALINGS):
        value = config.get(name)
        if isinstance(value, dict):
            yield name, value
            yield from ((f"{name}.{key}", part) for key, part in value.items() if isinstance(part, dict))


def _nonzero(entry: dict[str, Any], where: str, *names: str) -> None:
    for name in names:
        if _number(entry, name) == 0:
            raise _angle_error(where, name, entry, "a divisor")


def _number(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else value


def _angle_error(where: str, name: str, values: dict[str, Any], problem: str) -> ModelError:
    return ModelError(f"{where}{name} = {values[name]!r:.40}, which is {problem}")


# -- vocabularies, counted in the files before a library reads them ----------------------------------------------------


MOST_TOKENS = 1 << 20  # XLM-V has 901,629, and no other published vocabulary more than half of them
MOST_MERGES = 1 << 21  # Gemma 3 has 514,906
MOST_ADDED = 1 << 22  # bytes of all added tokens: 200,000 of usual length
MOST_PREFIXES = 1 << 22  # bytes of a Unigram vocabulary, what pieces share counted once
MOST_LISTED = 1 << 16  # special tokens in a list
ADDED = (2, 3, 4)  # the types of unknown, control and user-defined tokens, which become added tokens
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
        check_vocabulary(name, tokens=tokens, merges=merges, added=_letters(added))
        if isinstance(vocabulary, list):
            check_unigram(name, (str(entry[0]) for entry in vocabulary if isinstance(entry, list) and entry))
    elif name in ("vocab.json", "added_tokens.json"):
        check_vocabulary(
            name, tokens=len(data), added=sum(map(vocabulary_bytes, data)) if name == "added_tokens.json" else 0
        )
    elif name == "tekken.json":
        special = data.get("special_tokens")
        check_vocabulary(name, tokens=_count(data.get("vocab")) + _count(special), added=_letters(special))
    else:
        for key in _LISTS:
            if _count(data.get(key)) > MOST_LISTED:
                raise _too_many(name, "special tokens in a list", _count(data[key]), MOST_LISTED)
        parts = {key: value for key, value in data.items() if key != "chat_template"}
        check_vocabulary(name, tokens=_count(data.get("added_tokens_decoder")), added=_letters(parts))


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
            check_vocabulary(name, merges=content.count(b"\n"))
        else:
            check_vocabulary(name, tokens=content.count(b"\n"))


def check_vocabulary(name: str, *, tokens: int = 0, merges: int = 0, added: int = 0) -> None:
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


def vocabulary_bytes(text: str) -> int:
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
            letters += vocabulary_bytes(value)
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
            check_vocabulary(name, tokens=len(listed), added=added)
        elif field == 2 and isinstance(value, bytes):
            kind = next((each for number, each in _fields(value) if number == 3 and isinstance(each, int)), 1)
    if kind != _BPE:
        check_unigram(name, listed)


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in the encoding of Protocol Buffers, up to one that is damaged."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        length, at = _varint(content, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, len(content)), at)
        if at + length > len(content):
            return
        yield key >> 3, content[at : at + length]
        at += length


def _varint(content: bytes, at: int) -> tuple[int, int]:
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

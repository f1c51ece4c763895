"""The header of a GGUF file: metadata and the places of tensors. Every claimed length is checked against the file.

Little endian (github.com/ggml-org/ggml/blob/master/docs/gguf.md): `GGUF`, u32 version, u64 count of tensors, u64 count
of keys; each key as a string (u64 length, bytes), u32 type, value; each tensor as a name, u32 count of dimensions, u64
dimensions (the fastest first), u32 type, u64 offset. The tensors follow at the next multiple of `general.alignment`.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import Any

from genctl.errors import ModelError, reason_of
from genctl.models import tokenizer_limits
from genctl.models.tokenizer_limits import SPECIAL_TYPES
from genctl.models.weights import LARGEST_JSON, LARGEST_NUMBER, Tensor, shown

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_MOST_DIMENSIONS = 4  # ggml's limit
_MOST_LISTED = 4096  # items of an array that is read: one for each layer, and the sections of M-RoPE
_MOST_ITEMS = 1 << 22  # in all arrays; three times those of the largest public vocabularies
_LARGEST_ALIGNMENT = 1 << 20
_LISTS = {  # of a tokenizer, each with the types that its items may have; the last is bytes of a normalizer
    "tokens": (_STRING,),
    "token_type": (5, 4),
    "scores": (6, 5),
    "merges": (_STRING,),
    "precompiled_charsmap": (0, 1),
}
_TOKENS, _TOKEN_TYPE = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Tokens that end a turn or a text where the file has no key for them, as llama.cpp knows them.
_ENDING = """
    <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|> </s>
    <|end_of_text|> <EOT> _<EOT> [EOT] [EOS] <end_of_utterance> <eos> <turn|> <|tool_response> [e~[
    <｜end▁of▁sentence｜> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO>
    <reponame> <|file_sep|>
"""
END_TEXTS = frozenset(_ENDING.split())
_LONGEST_END = max(len(text.encode()) for text in END_TEXTS)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # the name of a part: llama.cpp's
_ALIGNMENT = 32  # if the file has none
_NUMBERS = ("F", "BF", "Q", "IQ", "TQ", "MXFP", "NVFP")  # beginnings of the names of types that hold weights


@dataclass(frozen=True)
class TokenLists:
    """The lists of a tokenizer: an item for each token, and pairs of tokens with a space between; [] without one."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    charsmap: list[int]  # the bytes of SentencePiece's normalizer


@dataclass(frozen=True)
class GgufTensor(Tensor):
    """A tensor of a file that may be in several parts."""

    part: int = 0  # of the file, from 0


@dataclass(frozen=True)
class Header:
    """The content of a header: values of metadata, and tensors by name.

    Of the tokenizer's arrays, of long ones and of those of texts, `metadata` has the number of items.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    files: tuple[Path, ...] = ()  # the parts, the first of which has the metadata
    ends: tuple[int, ...] = ()  # ids of tokens that end a turn or a text, the end of a text first
    vocabulary: TokenLists = TokenLists([], [], [], [], [])  # if it is read

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


def inner_ends(tokens: Collection[str]) -> list[str]:
    """Texts of END_TEXTS that end nothing in a vocabulary with these tokens, by llama.cpp's rules.

    <|end|> ends a part of an answer beside <|return|> and <|call|> (gpt-oss); </s> is a normal token of Gemma 4.
    """
    calls = "<|call|>" in tokens or "<|calls|>" in tokens
    parts = calls and ("<|return|>" in tokens or "<|flush|>" in tokens)
    return ["<|end|>"] * parts + ["</s>"] * ("<|tool_response>" in tokens or "<|plamo:eos|>" in tokens)


def read(path: Path, *, vocabulary: bool = False) -> Header:
    """The header of a file, with the `vocabulary` on request. Raises ModelError, naming the file, if it is damaged.

    A model that lies in several files (`-00001-of-00003.gguf`) is read from the first of them.
    """
    header = _read(path, 0, vocabulary)
    name, count, place = shown(path.name), header.metadata.get("split.count", 0), header.metadata.get("split.no", 0)
    if type(count) is not int or type(place) is not int or count <= 1:
        return replace(header, files=(path,))
    match = _PART.fullmatch(path.name)
    if match is None or (int(match[2]), int(match[3])) != (place + 1, count):
        raise ModelError(f"{name} is part {place + 1} of {count}, and its name does not say so (-00001-of-{count:05})")
    files = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if place:
        raise ModelError(f"{name} is part {place + 1} of {count}", hint=f"give the first part: {shown(files[0].name)}")
    tensors = dict(header.tensors)
    for number, file in enumerate(files[1:], 1):
        if not file.is_file():
            raise ModelError(f"{name} is the first of {count} parts, and {shown(file.name)} is not beside it")
        part = _read(file, number, vocabulary=False)
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise ModelError(f"{shown(file.name)} does not say that it is part {number + 1} of {count}")
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise ModelError(f"{shown(file.name)} holds {shown(twice[0])}, which an earlier part holds too")
        tensors |= part.tensors
    if header.metadata.get("split.tensors.count", len(tensors)) != len(tensors):
        stated = header.metadata["split.tensors.count"]
        raise ModelError(f"{name} says that its parts hold {stated!r:.20} tensors, and they hold {len(tensors):,}")
    return replace(header, tensors=tensors, files=tuple(files))


def _read(path: Path, part: int, vocabulary: bool) -> Header:
    name = shown(path.name)
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{name} is no GGUF file: it does not begin with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(name, data, part).header(vocabulary)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {name}: {reason_of(error)}") from error


class _Reader:
    """A place in a mapped file. Every step raises ModelError if the file is shorter than it claims."""

    def __init__(self, name: str, data: mmap.mmap, part: int) -> None:
        self.name, self.data, self.part, self.at, self.items = name, data, part, len(MAGIC), 0
        self.tokens: list[tuple[int, int]] = []  # where each lies
        self.types = b""  # the kind of each
        self.arrays: dict[str, tuple[int, int, int]] = {}  # type, place and number of the items

    def header(self, vocabulary: bool) -> Header:
        version = self.number("<I")
        if version & 0xFFFF == 0:
            raise self.refused("it was written for big-endian machines")
        if version not in _VERSIONS:
            raise self.refused(f"its format has version {version:,}; known are 2 and 3")
        count, keys = self.number("<Q"), self.number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(self.fits(keys, 13, "keys")):
            key = self.string("a key")
            if key in metadata:
                raise self.refused(f"the key {shown(key, 60)} is given twice")
            metadata[key] = self.value(key)
        if not isinstance(metadata.get("general.architecture"), str) and not (self.part or metadata.get("split.no")):
            raise self.refused("its general.architecture does not say which architecture it is")
        tensors = self.tensors(count, self.alignment(metadata))
        self.check_vocabulary(metadata)
        found = TokenLists(*starmap(self.items_of, _LISTS.items())) if vocabulary else Header.vocabulary
        return Header(metadata, tensors, ends=self.ends(metadata), vocabulary=found)

    def items_of(self, name: str, kinds: tuple[int, ...]) -> list[Any]:
        key = f"tokenizer.ggml.{name}"
        kind, self.at, count = self.arrays.get(key, (kinds[0], 0, 0))
        if kind not in kinds:
            raise self.refused(f"{key} is an array of the type {kind}")
        if kind == _STRING:
            return [self.string(f"an item of {key}") for _ in range(count)]
        return self.listed(key) if count else []

    def listed(self, key: str) -> list[Any]:
        """The items of an array of numbers."""
        kind, at, count = self.arrays[key]
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind][1:]}", self.data, at))

    def ends(self, metadata: dict[str, Any]) -> tuple[int, ...]:
        """The end tokens that keys name, and those that are known by their texts."""
        named = [metadata[key] for key in _ENDS if type(metadata.get(key)) is int]
        texts = {
            self.data[begin:end].decode(errors="replace"): id
            for id, (begin, end) in enumerate(self.tokens)
            if end - begin <= _LONGEST_END and self.data[begin : begin + 1] in (b"<", b"[", b"_")
        }
        found = [id for text, id in texts.items() if text in END_TEXTS.difference(inner_ends(texts))]
        return tuple(dict.fromkeys([*named, *found]))

    def value(self, key: str) -> Any:
        kind = self.number("<I")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string(shown(key, 60))
        if kind != _ARRAY:
            raise self.refused(f"{shown(key, 60)} has the unknown type {kind:,}")
        kind, count, name = self.number("<I"), self.number("<Q"), shown(key, 60)
        if kind not in _SCALARS and kind != _STRING:
            raise self.refused(f"{name} is an array of the unknown type {kind:,}")
        size = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])
        self.fits(count, size, f"items of {name}")
        self.items += count
        self.arrays[key] = (kind, self.at, count)
        if self.items > _MOST_ITEMS:
            raise self.refused(f"its arrays hold {self.items:,} items, far above what any model has")
        if kind != _STRING:
            if key == _TOKEN_TYPE:
                self.types = self.data[self.at : self.at + count * size : size]  # little endian, and small numbers
            self.skip(count * size, name)
            return count if key.startswith("tokenizer.") or count > _MOST_LISTED else self.listed(key)
        if key == _TOKENS:
            tokenizer_limits.check_vocabulary(self.name, tokens=count)
        for _ in range(count):
            before = self.at + 8
            self.skip(self.number("<Q"), name)
            if key == _TOKENS:
                self.tokens.append((before, self.at))
        return count

    def check_vocabulary(self, metadata: dict[str, Any]) -> None:
        """Raises ModelError for a vocabulary of which a library would make tables larger than those of any model."""
        lengths = [end - begin for begin, end in self.tokens]
        added = sum(size for size, kind in zip(lengths, self.types, strict=False) if kind in SPECIAL_TYPES)
        merges = metadata.get("tokenizer.ggml.merges")
        tokenizer_limits.check_vocabulary(
            self.name,
            tokens=len(lengths),
            merges=merges if isinstance(merges, int) else 0,
            added=added,
            pieces=sum(lengths) if metadata.get("tokenizer.ggml.model") == "t5" else 0,
        )
        if sum(lengths) > LARGEST_JSON:
            raise self.refused(f"its tokens have {sum(lengths):,} bytes, far above what any model has")

    def alignment(self, metadata: dict[str, Any]) -> int:
        found = metadata.get("general.alignment", _ALIGNMENT)
        if type(found) is not int or not 0 < found <= _LARGEST_ALIGNMENT or found & (found - 1):
            raise self.refused(f"its general.alignment is {found!r:.40}, which is no power of two up to 2^20")
        return found

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        kinds = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
        tensors: dict[str, GgufTensor] = {}
        for _ in range(self.fits(count, 24, "tensors")):
            name = self.string("the name of a tensor")
            if name in tensors:
                raise self.refused(f"tensor {shown(name)} is there twice")
            dimensions = self.number("<I")
            if dimensions > _MOST_DIMENSIONS:
                raise self.refused(f"tensor {shown(name)} has {dimensions:,} dimensions; at most 4 are known")
            shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
            kind, offset = self.number("<I"), self.number("<Q")
            if kind not in kinds:
                raise self.refused(f"tensor {shown(name)} has the unknown type {kind:,}")
            dtype, block, size = kinds[kind]
            if not dtype.startswith(_NUMBERS):
                raise self.refused(
                    f"tensor {shown(name)} holds {dtype} numbers; weights must be floating-point numbers"
                )
            if max((*shape, math.prod(shape)), default=0) >= LARGEST_NUMBER or (shape and shape[-1] % block):
                raise self.refused(f"tensor {shown(name)} has an impossible shape")
            if offset % alignment:
                raise self.refused(f"tensor {shown(name)} does not lie at a multiple of {alignment:,} bytes")
            tensors[name] = GgufTensor(dtype, shape, offset, offset + math.prod(shape) // block * size)
        begin = -(-self.at // alignment) * alignment
        placed = {
            name: replace(tensor, begin=begin + tensor.begin, end=begin + tensor.end, part=self.part)
            for name, tensor in tensors.items()
        }
        self.check_ranges(placed)
        return placed

    def check_ranges(self, tensors: Mapping[str, Tensor]) -> None:
        before, at = "", 0
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            if tensor.begin < at:
                raise self.refused(f"tensor {shown(name)} overlaps {before}")
            if tensor.end > len(self.data):
                missing = tensor.end - len(self.data)
                raise self.refused(f"{missing:,} bytes of tensor {shown(name)} lie beyond its end")
            before, at = shown(name), tensor.end

    def number(self, form: str) -> Any:
        size = struct.calcsize(form)
        if self.at + size > len(self.data):
            raise self.refused("it ends within its header")
        self.at += size
        return struct.unpack_from(form, self.data, self.at - size)[0]

    def string(self, what: str) -> str:
        begin = self.at + 8
        self.skip(self.number("<Q"), what)
        try:
            return self.data[begin : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise self.refused(f"{what} is not UTF-8 text") from None

    def skip(self, size: int, what: str) -> None:
        if size > len(self.data) - self.at:
            raise self.refused(f"{what} claims {size:,} bytes, and {len(self.data) - self.at:,} are left")
        self.at += size

    def fits(self, count: int, least: int, what: str) -> int:
        """Returns `count`. Raises ModelError unless that many items of `least` bytes fit into the rest of the file."""
        if count * least > len(self.data) - self.at:
            raise self.refused(f"it claims {count:,} {what}, more than fit into {len(self.data):,} bytes")
        return count

    def refused(self, why: str) -> ModelError:
        return ModelError(f"{self.name} is damaged: {why}")

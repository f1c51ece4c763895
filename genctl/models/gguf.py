"""GGUF files: their header, and checks of what transformers reads. Every claimed length is checked against the file.

Little endian (github.com/ggml-org/ggml/blob/master/docs/gguf.md): `GGUF`, u32 version, u64 count of tensors, u64 count
of keys; each key as a string (u64 length, bytes), u32 type, value; each tensor as a name, u32 count of dimensions, u64
dimensions (the fastest first), u32 type, u64 offset. The tensors follow at the next multiple of `general.alignment`.

The native runtime reads the tensors (`native.plan`, `native.blocks`), as stored or unpacked; or transformers does,
unpacked. transformers skips tensors silently, so what it has read is compared with the file (`check_read`).
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.errors import ModelError, reason_of
from genctl.models import libraries
from genctl.models.tokenizer_limits import SPECIAL_TYPES, check_vocabulary
from genctl.models.weights import LARGEST_JSON, LARGEST_NUMBER, Tensor, few, shown
from genctl.native.plan import ROPE_FACTORS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from genctl.models.check import Checkpoint

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_MOST_DIMENSIONS = 4  # ggml's limit
_MOST_ITEMS = 1 << 22  # in all arrays: three times those of the largest public vocabularies
_MOST_FACTORS = 1 << 16
_ALIGNMENT, _LARGEST_ALIGNMENT = 32, 1 << 20
_KEY = "tokenizer.ggml"
_LISTS: dict[str, Any] = {  # arrays of a tokenizer, and the types of their items
    "tokens": str, "token_type": int, "scores": (float, int), "merges": str, "precompiled_charsmap": int,
}  # fmt: skip
# Tokens that end a turn or a text if the file has no key for them, as in llama.cpp.
_ENDING = """
    <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|> </s>
    <|end_of_text|> <EOT> _<EOT> [EOT] [EOS] <end_of_utterance> <eos> <turn|> <|tool_response> [e~[
    <｜end▁of▁sentence｜> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO>
    <reponame> <|file_sep|>
"""
END_TEXTS = frozenset(_ENDING.split())
# Keys that do not affect a text, besides those that do not begin with the architecture (general.*, split.*).
HARMLESS = ("tensor_data_layout", "pooling_type", "classifier.output_labels", "rope.scaling.finetuned")
_LARGEST = 3e38  # nearly the maximum of float32
_NUMBERS = ("F", "BF", "Q", "IQ", "TQ", "MXFP", "NVFP")  # prefixes of the types that hold weights
# Tensors without an effect: tables computed from the config, layers that predict further tokens, other modalities.
_UNREAD = re.compile(r".*(rot_embd|\.nextn\.|mtp).*|(v|a|mm)\..*|rope_factors_(short|long)\.weight")


@dataclass(frozen=True)
class GgufTensor(Tensor):
    """A tensor of a file that may consist of several parts."""

    part: int = 0  # of the file, from 0


@dataclass(frozen=True)
class Header:
    """The content of a header: values of metadata (an array is a list), and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    files: tuple[Path, ...] = ()  # the parts; the first has the metadata

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def tokens(self) -> list[str]:
        """The tokens by id; [] without a tokenizer."""
        return list(self.metadata.get(f"{_KEY}.tokens", ()))

    def ends(self) -> tuple[int, ...]:
        """Ids of tokens that end a turn or a text: those named by keys, and those known by their texts."""
        named = (self.metadata.get(f"{_KEY}.{name}_token_id") for name in ("eos", "eot", "eom"))
        ids = {text: id for id, text in enumerate(self.tokens)}
        known = sorted(ids[text] for text in END_TEXTS.intersection(ids).difference(inner_ends(ids)))
        return tuple(dict.fromkeys([*(id for id in named if type(id) is int), *known]))

    def factors(self, name: str) -> tuple[float, ...]:
        """The values of a small tensor; () if it is missing. Raises ModelError."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return ()
        file = self.files[tensor.part]
        if tensor.numel > _MOST_FACTORS:
            raise ModelError(f"{shown(file.name)}: {name} holds {tensor.numel:,} factors")
        with file.open("rb") as opened:
            opened.seek(tensor.begin)
            data = opened.read(tensor.end - tensor.begin)
        if tensor.dtype != "F32" or not all(map(math.isfinite, found := struct.unpack(f"<{tensor.numel}f", data))):
            raise ModelError(f"{shown(file.name)}: {name} holds no factors")
        return found


def inner_ends(tokens: Collection[str]) -> list[str]:
    """Those of END_TEXTS that do not end a text in a vocabulary with these tokens, by llama.cpp's rules.

    <|end|> ends a part of an answer beside <|return|> and <|call|> (gpt-oss); </s> is a normal token of Gemma 4.
    """
    calls = "<|call|>" in tokens or "<|calls|>" in tokens
    parts = calls and ("<|return|>" in tokens or "<|flush|>" in tokens)
    return ["<|end|>"] * parts + ["</s>"] * ("<|tool_response>" in tokens or "<|plamo:eos|>" in tokens)


def read(path: Path) -> Header:
    """The header of a file. Raises ModelError, naming the file, if it is damaged.

    A model in several files is read from the first of them, `…-00001-of-00003.gguf`, as llama.cpp names it.
    """
    header = _read(path, 0)
    count = header.metadata.get("split.count")
    if type(count) is not int or count <= 1:
        return replace(header, files=(path,))
    first = f"-00001-of-{count:05}.gguf"
    if not path.name.endswith(first):
        raise ModelError(f"{shown(path.name)} is one of {count} parts: give the first part (…{first})")
    files, tensors = [path], dict(header.tensors)
    for number in range(1, count):
        files.append(path.with_name(f"{path.name.removesuffix(first)}-{number + 1:05}-of-{count:05}.gguf"))
        tensors |= _read(files[-1], number).tensors
    return replace(header, tensors=tensors, files=tuple(files))


def decimal(value: Any) -> Any:
    """The shortest decimal number with the same float32 value: 1e-06 for 9.99999997e-07 in the file.

    Other values are returned unchanged.
    """
    if not isinstance(value, float) or not abs(value) < _LARGEST:
        return value
    short = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((each for each in short if struct.pack("<f", each) == struct.pack("<f", value)), value)


def tokenizer_header(path: Path, *, needed: bool = True) -> Header:
    """The header of a GGUF file. Raises ModelError, also if a tokenizer is `needed` and missing."""
    name = shown(path.name)
    libraries.require(name, ("gguf",), "gguf")
    header = read(path)
    if needed and not header.tokens:
        hint = 'prompts in token ids need none: rows such as {"prompt_ids": [5, 60, 7]} in a JSONL input'
        raise ModelError(f"{name} holds no tokenizer, so it cannot read text", hint=hint)
    return header


def rope_factors(checkpoint: Checkpoint) -> tuple[float, ...]:
    """The divisors of the rotary frequencies; () if the file has none. Raises ModelError."""
    weights = checkpoint.weights
    header = Header({}, weights.tensors, weights.files)  # type: ignore[arg-type]
    return header.factors(ROPE_FACTORS)


def _read(path: Path, part: int) -> Header:
    name = shown(path.name)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[: len(MAGIC)] != MAGIC:
                raise ModelError(f"{name} is no GGUF file: it does not begin with GGUF")
            return _Reader(name, data, part).header()
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {name}: {reason_of(error)}") from error


class _Reader:
    """A position in a mapped file. Every step raises ModelError if the file is shorter than it claims."""

    def __init__(self, name: str, data: mmap.mmap, part: int) -> None:
        self.name, self.data, self.part, self.at, self.items = name, data, part, len(MAGIC), 0

    def header(self) -> Header:
        version = self.number("<I")
        if version not in _VERSIONS:
            raise self.refused(f"its format has version {version:,}; known are 2 and 3")
        count, keys = self.number("<Q"), self.number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(self.fits(keys, 13, "keys")):
            key = self.strings(1, "a key")[0]
            metadata[key] = self.value(shown(key, 60), self.number("<I"))
        if not isinstance(metadata.get("general.architecture"), str) and not (self.part or metadata.get("split.no")):
            raise self.refused("its general.architecture does not say which architecture it is")
        self.check_lists(metadata)
        return Header(metadata, self.tensors(count, metadata.get("general.alignment", _ALIGNMENT)))

    def value(self, name: str, kind: int) -> Any:
        if is_array := kind == _ARRAY:
            kind, count = self.number("<I"), self.number("<Q")
        if kind not in _SCALARS and kind != _STRING:
            raise self.refused(f"{name} has the unknown type {kind:,}")
        if not is_array:
            return self.strings(1, name)[0] if kind == _STRING else self.number(_SCALARS[kind])
        size = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])
        self.fits(count, size, f"items of {name}")
        self.items += count
        if self.items > _MOST_ITEMS:
            raise self.refused(f"its arrays hold {self.items:,} items, far above what any model has")
        if kind == _STRING:
            return self.strings(count, name)
        self.at += count * size
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind][1:]}", self.data, self.at - count * size))

    def check_lists(self, metadata: dict[str, Any]) -> None:
        """Raises ModelError for a vocabulary from which a library would build larger tables than any model has."""
        lists = {name: metadata.get(f"{_KEY}.{name}", []) for name in _LISTS}
        for name, kind in _LISTS.items():
            if not isinstance(lists[name], list) or not all(isinstance(item, kind) for item in lists[name][:1]):
                raise self.refused(f"{_KEY}.{name} is no list of {'texts' if kind is str else 'numbers'}")
        tokens = lists["tokens"]
        special = (token for token, kind in zip(tokens, lists["token_type"], strict=False) if kind in SPECIAL_TYPES)
        added = sum(len(token.encode()) for token in special)
        pieces = sum(len(token.encode()) for token in tokens) if metadata.get(f"{_KEY}.model") == "t5" else 0
        check_vocabulary(self.name, tokens=len(tokens), merges=len(lists["merges"]), added=added, pieces=pieces)

    def tensors(self, count: int, alignment: Any) -> dict[str, GgufTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if type(alignment) is not int or not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
            raise self.refused(f"its general.alignment is {alignment!r:.40}, which is no power of two up to 2^20")
        weights = (kind for kind in GGMLQuantizationType if kind.name.startswith(_NUMBERS))
        kinds = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in weights}
        found: dict[str, GgufTensor] = {}
        for _ in range(self.fits(count, 24, "tensors")):
            name = self.strings(1, "the name of a tensor")[0]
            dimensions = self.number("<I")
            if dimensions > _MOST_DIMENSIONS:
                raise self.refused(f"tensor {shown(name)} has {dimensions:,} dimensions; at most 4 are known")
            shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
            kind, offset = self.number("<I"), self.number("<Q")
            if kind not in kinds:
                raise self.refused(f"tensor {shown(name)} has the type {kind:,}, which is none of weights")
            dtype, block, size = kinds[kind]
            if max((*shape, math.prod(shape)), default=0) >= LARGEST_NUMBER or (shape and shape[-1] % block):
                raise self.refused(f"tensor {shown(name)} has an impossible shape")
            if offset % alignment:
                raise self.refused(f"tensor {shown(name)} does not lie at a multiple of {alignment:,} bytes")
            found[name] = GgufTensor(dtype, shape, offset, offset + math.prod(shape) // block * size, self.part)
        start = -(-self.at // alignment) * alignment
        for name, tensor in found.items():
            found[name] = replace(tensor, begin=start + tensor.begin, end=start + tensor.end)
            if (missing := start + tensor.end - len(self.data)) > 0:
                raise self.refused(f"{missing:,} bytes of tensor {shown(name)} lie beyond its end")
        return found

    def number(self, form: str) -> Any:
        size = struct.calcsize(form)
        if self.at + size > len(self.data):
            raise self.refused("it ends within its header")
        self.at += size
        return struct.unpack_from(form, self.data, self.at - size)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """The next `count` strings."""
        at, size, length_at, found = self.at, len(self.data), struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            begin = at + 8
            if begin > size:
                raise self.refused("it ends within its header")
            at = begin + length_at(self.data, at)[0]
            if at > size:
                raise self.refused(f"{what} claims {at - begin:,} bytes, and {size - begin:,} are left")
            if at - self.at > LARGEST_JSON + 8 * count:
                raise self.refused(f"{what} has {at - self.at:,} bytes, far above what any model has")
            found.append(self.data[begin:at])
        self.at = at
        try:
            return [each.decode() for each in found]
        except UnicodeDecodeError:
            raise self.refused(f"{what} is not UTF-8 text") from None

    def fits(self, count: int, least: int, what: str) -> int:
        """Returns `count`. Raises ModelError unless that many items of `least` bytes fit into the rest of the file."""
        if count * least > len(self.data) - self.at:
            raise self.refused(f"it claims {count:,} {what}, more than fit into {len(self.data):,} bytes")
        return count

    def refused(self, why: str) -> ModelError:
        return ModelError(f"{self.name} is damaged: {why}")


# -- files that transformers' classes run ------------------------------------------------------------------------------

# Keys that transformers ignores, with the fields whose defaults they must equal.
_LEFT_OUT = {
    "attention.key_length": ("head_dim", "d_kv"),
    "attention.value_length": ("head_dim", "d_kv"),
    "attention.layer_norm_epsilon": ("norm_eps",),
    "attention.layer_norm_rms_epsilon": ("layer_norm_epsilon", "rms_norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "decoder_block_count": ("num_decoder_layers",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
}
_SHARED_GATE = re.compile(r"model\.layers\.(\d+)\.mlp\.shared_expert_gate\.weight")


def their_config(path: Path, header: Header) -> dict[str, Any]:
    """The config as transformers reads it. Raises ModelError for a key that is not read and may matter."""
    from transformers import AutoConfig
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    name, keys, begin = shown(path.name), header.metadata, f"{header.architecture}."
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    fields = {**json.loads(config.to_json_string(use_diff=False)), "model_type": config.model_type}
    fields.pop("_model_name_or_path", None)  # general.name
    if header.architecture == "t5":  # transformers treats all as gated, with the activation of ungated ones
        for field in ("is_gated_act", "dense_act_fn", "scale_decoder_outputs"):
            fields.pop(field, None)
        fields["feed_forward_proj"] = "gated-gelu" if "enc.blk.0.ffn_gate.weight" in header.tensors else "relu"
        fields["tie_word_embeddings"] = "output.weight" not in header.tensors  # scales the input of the head
    if not header.tokens:  # transformers counts the tokens; without any it takes its class's default
        fields["vocab_size"] = keys.get(f"{begin}vocab_size", fields.get("vocab_size"))
    read = GGUF_CONFIG_MAPPING.get(header.architecture.replace("-", "_"))
    for key, value in keys.items():
        own = key.removeprefix(begin)
        if own in ("rope.scaling.factor", "rope.scale_linear"):
            known = value in (0.0, 1.0)
        else:
            known = read is None or not value or own in (key, *read, *HARMLESS) or own.startswith("rope.scal")
        if not known and decimal(value) not in [decimal(fields.get(field)) for field in _LEFT_OUT.get(own, ())]:
            raise ModelError(f"{name}: transformers does not read {shown(key, 60)} = {value!r:.40}")
    return fields


def read_gates(model: PreTrainedModel, mismatched: list[str], path: Path) -> list[str]:
    """Read Qwen2-MoE's gates [1, hidden], for which transformers expects one dimension too many.

    Returns the other names of `mismatched`.
    """
    import torch

    gates = {name: match[1] for name in mismatched if (match := _SHARED_GATE.fullmatch(name))}
    header = read(path)
    for name, layer in gates.items():
        gate = torch.tensor(header.factors(f"blk.{layer}.ffn_gate_inp_shexp.weight"))
        model.get_parameter(name).data.copy_(gate.view(1, -1))
    return [name for name in mismatched if name not in gates]


def check_read(model: PreTrainedModel, unexpected: list[str], path: Path) -> list[str]:
    """Apply the tensors that transformers skips. Returns the names of those without an effect.

    `unexpected`: names that transformers reports. Raises ModelError for tensors without a place in the model.
    """
    header = read(path)
    if header.architecture == "falcon" and getattr(model.config, "new_decoder_architecture", False):
        raise ModelError(
            f"{shown(path.name)}: transformers reads queries, keys and values of this Falcon in another order"
        )
    reads = reader_of(model, header.architecture)
    left = sorted(unexpected if reads is None else (name for name in header.tensors if not reads(name)))
    if ROPE_FACTORS in left and _scale_frequencies(model, header):
        left.remove(ROPE_FACTORS)
    if missed := [name for name in left if not _UNREAD.fullmatch(name)]:
        raise ModelError(
            f"{shown(path.name)} holds {len(missed)} tensors for which the model of its metadata has no place: "
            f"{few(missed)}"
        )
    return left


def reader_of(model: Any, architecture: str) -> Callable[[str], bool] | None:
    """A test by name: does a GGUF tensor go into `model`? None if transformers itself reports those left out."""
    with suppress(ImportError):  # an older transformers has only the other reader
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        if is_gguf_arch_supported(architecture):
            return None
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    names = {*get_gguf_hf_weights_map(model, TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={}))}
    if architecture == "gpt2":
        names.add("output.weight")  # read under its own name
    return lambda name: name in names or name.removesuffix(".weight") in names  # stacked experts have no suffix there


def _scale_frequencies(model: PreTrainedModel, header: Header) -> bool:
    """Divide the rotary frequencies by the file's factors (Llama 3.1); returns whether the model has such ones."""
    import torch

    factors, scaled = torch.tensor(header.factors(ROPE_FACTORS)), False
    for name, frequencies in model.named_buffers():
        if name.endswith("inv_freq") and frequencies.shape == factors.shape:
            frequencies.div_(factors.to(frequencies))
            scaled = True
    return scaled

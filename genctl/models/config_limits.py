"""The numbers in a config.json: those that no model can have, and how many tokens fit. No torch and no transformers.

Sizes are refused before anything is built from them. Libraries have more than a thousand names for numbers that become
dimensions, so a number counts as a size unless its name says otherwise. The limits are generous: no published model
comes near them, and a number within them costs megabytes at most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from genctl.errors import ModelError
from genctl.models.architectures import facts_of
from genctl.models.weights import WeightFiles, shown

_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers",
)  # fmt: skip
_INNER = ("intermediate_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_HEAD_DIM = ("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "qk_head_dim")
_COUNTS = (*_HEADS, "num_key_value_heads", "num_local_experts", "num_experts", "num_labels")
_WINDOWS = ("sliding_window", "attention_chunk_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_POSITION_TABLES = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight")
_MOST = {
    **dict.fromkeys((*LAYERS, *_COUNTS), 1 << 16),
    **dict.fromkeys((*_HIDDEN, *_INNER, "vocab_size"), 1 << 24),
    **dict.fromkeys((*_POSITIONS, *_WINDOWS), 1 << 27),
}
_MOST_COMPUTED = 1 << 20  # positions in a computed table
_MOST_ROWS = 1 << 20  # rows of other tables
MOST = 1 << 16  # a size that is not a dimension of a tensor in the weight files
_DEEPEST = 8
# Not sizes: ids of tokens, lengths in tokens, samples and pixels, rates, seeds, and training parameters.
_OTHERWISE = re.compile(
    r".*(token|vocab|_ids?$|_index|offset|theta|base|length|position|context|window|chunk|floor|seed|rate|samples"
    r"|pixels|max_|min_|_max$|_min$|factor|version|budget|steps?$|hop|fft|image_size|budget|ctx|hash|period|threshold"
    r"|limit|bucket|distance|duration|frames|seconds|clip|param|bytes|flops|epoch|batch|timestamp|seen).*"
    r"|n_positions|pad_.*|.*_(ms|sec)"
)
# Rows of tables, which a checkpoint may hold in parts.
_TABLE = re.compile(r".*(vocab|position|hash|bucket).*")


def parts(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The config and the nested ones (`text_config`, `encoder`, …), each with the prefix of its keys."""
    yield config, ""
    for name, value in config.items():
        if isinstance(value, dict) and (name.endswith("_config") or name in ("encoder", "decoder")):
            yield value, f"{shown(name)}."


def check_numbers(config: dict[str, Any], source: str = "config.json") -> None:
    """Refuse sizes that are no positive whole numbers, or larger than any model's. Raises ModelError.

    `source` names the place of the config in messages.
    """
    for part, where in parts(config):
        computes_positions = facts_of(part.get("model_type")).computes_positions
        for name, most in _MOST.items():
            value = part.get(name)
            if value is None or (name in _WINDOWS and value is False):
                continue
            if name in (*_INNER, *_COUNTS) and isinstance(value, list):  # a list: one for each layer
                continue
            problem = f"{source} says {where}{name} = {value!r:.40}"
            if name in _POSITIONS and isinstance(value, float) and value.is_integer():
                value = int(value)  # musicflamingo's, as transformers saves it
            if type(value) is not int or value < (name in _HIDDEN):
                raise ModelError(f"{problem}, which is not a positive whole number")
            if name in _POSITIONS and computes_positions:
                most = _MOST_COMPUTED
            if value > most:
                raise ModelError(f"{problem}, far above what any model has ({most:,})")


def check_size(config: dict[str, Any], files: WeightFiles, source: str = "config.json") -> None:
    """Refuse a config that implies far more than the weight files hold, before anything is allocated.

    The config implies at least vocabulary x hidden + layers x (2 hidden² + 2 hidden x inner) parameters, and once
    hidden x heads x head size (queries). Four times what the headers hold, plus a million, is accepted. Layers are
    compared with the number of tensors, widths with the largest dimension, and positions with the rows of their table.

    Raises ModelError. `source` names the place of the config in messages.
    """
    audio = facts_of(config.get("model_type")).audio_parts
    built = [(part, where) for part, where in parts(config) if not (where and audio)]  # configs of the language model
    packed = 8 if config.get("quantization_config") else 1  # weights of at least four bits, in words of up to 32
    if packed == 1:
        check_widths(config, max(max(tensor.shape, default=1) for tensor in files.tensors.values()), source)
        tables = [tensor for name, tensor in files.tensors.items() if name.endswith(_POSITION_TABLES)]
        rows = max((table.shape[0] for table in tables if len(table.shape) == 2), default=0)
        for part, where in parts(config):
            for name in _POSITIONS:
                if rows and isinstance(part.get(name), int) and part[name] > 4 * rows + 1000:
                    problem = f"{source} says {where}{name} = {part[name]:,}"
                    raise ModelError(f"{problem}, but the position table has {rows:,} rows")
    numbers = sum(tensor.numel for tensor in files.tensors.values()) * packed
    implied = sum(_implied(part) for part, _ in built)
    if implied > 4 * numbers + 1_000_000:
        raise ModelError(f"{source} implies at least {implied:,} parameters, but the weight files hold {numbers:,}")
    for part, where in built:
        for name in LAYERS:
            if type(part.get(name)) is int and part[name] > most_layers(len(files.tensors)):
                held = f"the weight files hold {len(files.tensors):,} tensors"
                raise ModelError(f"{source} says {where}{name} = {part[name]:,}, but {held}")


def most_layers(tensors: int) -> int:
    """The largest number of layers that this many tensors may form: layers may share them."""
    return 4 * tensors + 256


def _implied(part: dict[str, Any]) -> int:
    def largest(names: tuple[str, ...]) -> int:
        return max((part[name] for name in names if type(part.get(name)) is int), default=0)

    hidden, vocabulary, layers = largest(_HIDDEN), part.get("vocab_size") or 0, largest(LAYERS)
    heads = largest(_HEADS) * largest(_HEAD_DIM) * hidden  # queries of one layer: others may have none
    return int(vocabulary * hidden + layers * (2 * hidden * hidden + 2 * hidden * largest(_INNER)) + heads)


def check_widths(config: dict[str, Any], widest: int, source: str = "config.json") -> None:
    """Refuse sizes of any name above `MOST` and above `widest`, the largest dimension of all tensors.

    Other numbers, positions and windows have their own limits. Raises ModelError.
    """
    for where, value in _sizes(config, ""):
        name = where.rpartition(".")[2]
        most = max(_MOST_ROWS, 64 * widest) if _OTHERWISE.fullmatch(name) else max(MOST, widest)
        if value > most and name not in (*_POSITIONS, *_WINDOWS):
            raise ModelError(f"{source} says {where} = {value!r:.40}, far above what any model has ({most:,})")


def _sizes(part: dict[str, Any], where: str) -> Iterator[tuple[str, int]]:
    """Each size with its name, also in nested objects and lists."""
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


# -- how many tokens fit into a model ----------------------------------------------------------------------------------

_NAMES = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx")
_SOURCE_NAMES = ("max_source_positions", "max_encoder_position_embeddings", "max_position_embeddings", "n_positions")
_SCALINGS = ("rope_scaling", "rope_parameters")
_STRETCHED = ("linear", "yarn", "longrope", "su", "llama3", "proportional")  # kinds of scaling that have a factor
MOST_POSITIONS = 1 << 53  # of a scaled context: every JSON reader represents this exactly
_BEFORE = "original_max_position_embeddings"
_PARTS = ("decoder", "text_config")  # the part of a composite config.json that writes texts


def context_of(config: Any) -> int | None:
    """The most tokens that a model or its decoder reads, as in `generate()`; None if there is no limit.

    With scaled rotary positions, texts may be longer than `trained_length`. `config` is a loaded configuration or
    the fields of a config.json.
    """
    length, part = trained_length(config), _decoder(config)
    if length is None or (hasattr(type(part), "rope_scaling") and not hasattr(type(part), "rope_parameters")):
        return length  # no limit, or a class of transformers without rotary positions
    fields = vars(part)  # transformers' classes have only rope_parameters, in one form for all files
    scaling, parameters = (fields.get(name) if isinstance(fields.get(name), dict) else {} for name in _SCALINGS)
    kinds = {name: entry for name, entry in parameters.items() if isinstance(entry, dict)}
    if kinds:  # only layers that see the whole text count: a window bounds the distances in the others
        if scaling:  # an older form
            kinds["full_attention"] = {**kinds.get("full_attention", {}), **scaling}
        whole = [entry for name, entry in kinds.items() if "sliding" not in name] or [{}]
        reaches = [_reach(length, entry, None, part) for entry in whole]
    else:
        reaches = [_reach(length, scaling or parameters, fields.get(_BEFORE), part)]
    return min((reach for reach in reaches if reach is not None), default=None)


def trained_length(config: Any) -> int | None:
    """The number of positions in a configuration; None if the model has no such limit."""
    kind = config.get("model_type") if isinstance(config, dict) else config.model_type
    return _limit(kind, _decoder(config), _NAMES)


def source_context_of(config: Any) -> int | None:
    """The most tokens that an encoder reads; None if there is no limit. `config` is a loaded configuration."""
    own = getattr(config, "encoder", None) or config  # only composites have a config for each side
    return _limit(getattr(own, "model_type", None), own, _SOURCE_NAMES)


def _limit(model_type: object, part: Any, names: Sequence[str]) -> int | None:
    if facts_of(model_type).unbounded:
        return None
    values = (getattr(part, name, None) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _decoder(config: Any) -> Any:
    """The part that writes texts, its fields as attributes."""
    if not isinstance(config, dict):
        return config.get_text_config(decoder=True)
    part = next((config[name] for name in _PARTS if isinstance(config.get(name), dict)), config)
    native = facts_of(part.get("model_type")).native
    default = {} if native is None else {"n_ctx": native.context}  # the last name: any other one wins
    return SimpleNamespace(**{**default, **part})


def _reach(length: int, rope: dict[str, Any], original: object, part: Any) -> int | None:
    """How far one entry of `rope_parameters` reaches: its factor times the length before scaling."""
    kind, factor = str(rope.get("rope_type", rope.get("type"))), rope.get("factor")
    if "dynamic" in kind:
        return None
    before = next((one for one in (original, rope.get(_BEFORE)) if type(one) is int and one > 0), length)
    if factor is None and rope.get("long_factor") and before >= length:
        return None  # frequencies for longer texts, but no length
    published = facts_of(getattr(part, "model_type", None)).scaled_context == length
    if kind not in _STRETCHED or not isinstance(factor, (int, float)) or not math.isfinite(factor) or published:
        return length
    return max(length, int(min(before * factor, MOST_POSITIONS)))

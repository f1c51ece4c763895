"""Numbers in a config.json that no model can have, refused before anything is built of them.

Sizes: libraries have more than a thousand names for numbers that become dimensions, so a number counts as a size unless
its name says otherwise. The limits are generous: no published model comes near them, and a number within them costs
megabytes at most.

Angles of rotary positions: a base without a logarithm, a factor of 0 as a divisor, more features than a head has. The
native runtime and transformers' classes would fail on them, or compute NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
_MOST_COMPUTED = 1 << 20  # positions of a table that is computed

MOST = 1 << 16  # the largest size that is not a dimension of a tensor in the weight files
_DEEPEST = 8
# Not sizes: ids of tokens, lengths in tokens, samples and pixels, rates, seeds, and training parameters.
_OTHERWISE = re.compile(
    r".*(token|vocab|_ids?$|_index|offset|theta|base|length|position|context|window|chunk|floor|seed|rate|samples"
    r"|pixels|max_|min_|_max$|_min$|factor|version|budget|steps?$|hop|fft|image_size|budget|ctx|hash|period|threshold"
    r"|limit|bucket|distance|duration|frames|seconds|clip|param|bytes|flops|epoch|batch|timestamp|seen).*"
    r"|n_positions|pad_.*|.*_(ms|sec)"
)
# Rows of a table, many of which a checkpoint may keep in parts.
_TABLE = re.compile(r".*(vocab|position|hash|bucket).*")
_MOST_ROWS = 1 << 20


def parts(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The config and the nested ones (`text_config`, `encoder`, …), each with the prefix of its keys."""
    yield config, ""
    for name, value in config.items():
        if isinstance(value, dict) and (name.endswith("_config") or name in ("encoder", "decoder")):
            yield value, f"{shown(name)}."


def check_numbers(config: dict[str, Any], source: str = "config.json") -> None:
    """Refuse sizes that are not positive whole numbers or larger than any model's, and angles of positions that cannot
    be computed. Raises ModelError.

    `source` is what the message calls the place of the config.
    """
    for part, where in parts(config):
        check_angles(part, where, source)
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
            if name in _POSITIONS and facts_of(part.get("model_type")).computes_positions:
                most = _MOST_COMPUTED
            if value > most:
                raise ModelError(f"{problem}, far above what any model has ({most:,})")


def check_size(config: dict[str, Any], files: WeightFiles, source: str = "config.json") -> None:
    """Refuse a config that implies far more parameters than the weight files hold, before anything is allocated.

    The config implies at least vocabulary x hidden + layers x (2 hidden² + 2 hidden x inner) parameters, and queries of
    heads x their size. At most four times what the headers hold, plus a million, is accepted. A layer has a tensor of
    its own, except where layers share them: see `most_layers`. Raises ModelError. `source` is what the message calls
    the place of the config.
    """
    audio = facts_of(config.get("model_type")).audio_parts
    built = [(part, where) for part, where in parts(config) if not (where and audio)]  # of the language model
    packed = 1
    if config.get("quantization_config"):
        packed = 8  # weights of at least four bits, packed in words of up to 32
    else:
        _check_dimensions(config, files, source)
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
    """The largest number of layers that this many tensors may belong to."""
    return 4 * tensors + 256


def _check_dimensions(config: dict[str, Any], files: WeightFiles, source: str) -> None:
    """Compare widths with the largest dimension of all tensors, and positions with the rows of a position table."""
    widest = max(max(tensor.shape, default=1) for tensor in files.tensors.values())
    check_widths(config, widest, source)
    rows = [t.shape[0] for name, t in files.tensors.items() if name.endswith(_POSITION_TABLES) and len(t.shape) == 2]
    for part, where in parts(config):
        for name in _POSITIONS:
            if rows and isinstance(part.get(name), int) and part[name] > 4 * max(rows) + 1000:
                problem = f"the position table has {max(rows):,} rows"
                raise ModelError(f"{source} says {where}{name} = {part[name]:,}, but {problem}")


def _implied(part: dict[str, Any]) -> int:
    def largest(names: tuple[str, ...]) -> int:
        return max((part[name] for name in names if type(part.get(name)) is int), default=0)

    hidden, vocabulary, layers = largest(_HIDDEN), part.get("vocab_size") or 0, largest(LAYERS)
    heads = largest(_HEADS) * largest(_HEAD_DIM) * hidden  # the queries of one layer: other layers may have none
    return int(vocabulary * hidden + layers * (2 * hidden * hidden + 2 * hidden * largest(_INNER)) + heads)


def check_widths(config: dict[str, Any], widest: int, source: str = "config.json") -> None:
    """Refuse sizes of any name that no tensor has; `widest` is the largest dimension of all tensors.

    Positions and windows have limits of their own. Raises ModelError.
    """
    for where, value in _sizes(config, ""):
        name = where.rpartition(".")[2]
        most = max(_MOST_ROWS, 64 * widest) if _OTHERWISE.fullmatch(name) else max(MOST, widest)
        if value > most and name not in (*_POSITIONS, *_WINDOWS):
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


class _Angle(NamedTuple):
    """What some fields of rotary positions have to be. `scaled`: only where the kind of scaling reads them."""

    fields: tuple[str, ...]
    fits: Callable[[float], bool]
    problem: str
    scaled: bool = False


_ANGLES = (
    _Angle(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), lambda base: 0 < base < math.inf,
           "not a number above 0"),
    _Angle(("partial_rotary_factor", "rotary_pct", "rope_pct"), lambda share: 0 <= share <= 1, "not between 0 and 1"),
    _Angle(("beta_fast", "beta_slow"), lambda beta: beta >= 0, "below 0", scaled=True),
    _Angle(("factor", "low_freq_factor", "high_freq_factor"), lambda divisor: divisor != 0, "a divisor", scaled=True),
)  # fmt: skip


def check_angles(config: dict[str, Any], where: str = "", source: str = "config.json") -> None:
    """`config` is config.json or a part of it. `where` is what its keys begin with in messages, `source` the file.

    Raises ModelError.
    """
    entries = [(where, config)]
    for name in ("rope_parameters", "rope_scaling"):  # for all layers, or one for each kind of layer
        value = config.get(name)
        if isinstance(value, dict):
            entries.append((f"{where}{name}.", value))
            entries += [(f"{where}{name}.{key}.", each) for key, each in value.items() if isinstance(each, dict)]
    for at, entry in entries:
        kind = entry.get("rope_type", entry.get("type")) if entry is not config else None
        is_scaled = kind in ("linear", "llama3", "yarn") and "short_factor" not in entry  # of Phi-3: longrope
        for angle in _ANGLES:
            for field in angle.fields if is_scaled or not angle.scaled else ():
                value = number_of(entry, field)
                if value is not None and not angle.fits(value):
                    raise ModelError(f"{source} says {at}{field} = {value!r:.40}, which is {angle.problem}")
        if is_scaled and kind == "yarn" and entry.get("rope_theta", config.get("rope_theta")) == 1:
            raise ModelError(f"{source} says {at}rope_type = yarn with rope_theta = 1, whose logarithm is 0")


def number_of(values: dict[str, Any], name: str) -> float | None:
    """A number of a config; None for anything else, booleans too."""
    value = values.get(name)
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else value

"""Numbers in config.json that no model can have, refused before anything is allocated or built.

Sizes: libraries have more than a thousand names for numbers that become dimensions, so a number counts as a size unless
its name says otherwise. The bounds are generous: no published model comes near them, and a number within them costs
megabytes at most.

Angles of rotary positions: a base without a logarithm, a factor of 0 as a divisor, more features than a head has. The
native runtime and transformers' classes would fail on them, or compute NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from genctl.errors import ModelError
from genctl.models.architectures import facts_of
from genctl.models.weights import shown

# -- how many tokens fit into a model, as its configuration says. Imports no torch and no transformers -----------------


_NAMES = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx")
_SOURCE_NAMES = ("max_source_positions", "max_encoder_position_embeddings", "max_position_embeddings", "n_positions")
_PARTS = ("decoder", "text_config")  # of a composite config.json: the part that writes texts


def context_of(config: Any) -> int | None:
    """The maximum number of positions of a model or its decoder; None if there is no limit.

    `config` is a loaded configuration, or the fields of a config.json.
    """
    if not isinstance(config, dict):
        return _limit(config.model_type, config.get_text_config(decoder=True), _NAMES)
    part = next((config[name] for name in _PARTS if isinstance(config.get(name), dict)), config)
    native = facts_of(part.get("model_type")).native
    default = {} if native is None else {"n_ctx": native.context}  # the last name: any other one wins
    return _limit(config.get("model_type"), SimpleNamespace(**{**default, **part}), _NAMES)


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
_ENTRIES = ("rope_parameters", "rope_scaling")


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
    for name in _ENTRIES:
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

"""How many tokens fit into a model, as its configuration says. Imports no torch and no transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from genctl.models.architectures import facts_of
from genctl.models.config_limits import number_of

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
    kind, factor = str(rope.get("rope_type", rope.get("type"))), number_of(rope, "factor")
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

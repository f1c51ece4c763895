"""Rotary positions that cannot be computed, refused before anything is built.

No architecture can use these values: a base without a logarithm, a factor of 0 as a divisor, more features than
a head has. The native runtime and transformers' classes would fail on them, or compute NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from genctl.errors import ModelError

_BASES = ("rope_theta", "rotary_emb_base", "rope_local_base_freq")
_SHARES = ("partial_rotary_factor", "rotary_pct", "rope_pct")
_ENTRIES = ("rope_parameters", "rope_scaling")


def check(config: dict[str, Any], where: str = "", source: str = "config.json") -> None:
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
                    raise _error(at, field, entry, "below 0")
        if kind == "llama3":
            _nonzero(entry, at, "low_freq_factor", "high_freq_factor")
        if kind in ("linear", "llama3", "yarn") and "short_factor" not in entry:
            _nonzero(entry, at, "factor")


def _check_fields(values: dict[str, Any], where: str) -> None:
    for name in _BASES:
        base = _number(values, name)
        if base is not None and not (0 < base < math.inf):
            raise _error(where, name, values, "not a number above 0")
    for name in _SHARES:
        share = _number(values, name)
        if share is not None and not 0 <= share <= 1:
            raise _error(where, name, values, "not between 0 and 1")


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
            raise _error(where, name, entry, "a divisor")


def _number(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else value


def _error(where: str, name: str, values: dict[str, Any], problem: str) -> ModelError:
    return ModelError(f"{where}{name} = {values[name]!r:.40}, which is {problem}")

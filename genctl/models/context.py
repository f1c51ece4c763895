"""How many tokens fit into a model, as its configuration says. Imports no torch and no transformers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from genctl.models.architectures import facts_of

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

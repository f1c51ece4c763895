"""Shell completion of presets, strategies and model names. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable

Complete = Callable[[str], list[str]]


def presets(typed: str) -> list[str]:
    """Names of presets."""
    from genctl.config.presets import available

    return [preset.name for preset in available() if preset.name.startswith(typed)]


def strategies(typed: str) -> list[str]:
    """Names of decoding modes."""
    from genctl.config.named_strategies import NAMED

    return [name for name in NAMED if name.startswith(typed)]


def models(typed: str) -> list[str]:
    """Built-in checkpoints, and those in the local cache."""
    from genctl.models.listing import available

    return [model.name for model in available() if model.error is None and model.name.startswith(typed)]


COMPLETIONS: dict[str, Complete] = {
    "presets": presets,
    "strategy": strategies,
    "model": models,
    "assistant_model": models,
    "amateur_model": models,
}

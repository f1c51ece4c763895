"""Sides for tests: sessions on tiny checkpoints and on the built-in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from genctl.config.layers import flags_layer
from genctl.engines.protocol import Request
from genctl.engines.session import Session
from genctl.params import Runtime
from genctl.parity.sides import LocalSide

PROMPTS = ("Once upon a time", "The dog", "A little girl went to the", "One day, Tom")


def side(
    model: str | Path = "builtin:stories",
    *,
    width: int = 1,
    whole: bool = False,
    generation: dict[str, Any] | None = None,
    name: str = "",
    **runtime: Any,
) -> LocalSide:
    """A side of a checkpoint: greedy, 24 new tokens, with further knobs of generation and of the runtime."""
    settings = {"do_sample": False, "max_new_tokens": 24, **(generation or {})}
    layers = [flags_layer(settings)]
    session = Session.load(replace(Runtime(), model=str(model), **runtime), layers=layers)
    return LocalSide(name or str(model), session, session.resolve(layers), width=width, whole=whole)


def requests(reference: LocalSide, prompts: Sequence[str] = PROMPTS) -> list[Request]:
    """Prompts for the reference."""
    return [Request(str(number), reference.resolved, 0, prompt=prompt) for number, prompt in enumerate(prompts)]


def requests_of_ids(reference: LocalSide, prompts: Sequence[Sequence[int]]) -> list[Request]:
    """Prompts of token ids for the reference."""
    return [Request(str(number), reference.resolved, 0, prompt_ids=tuple(ids)) for number, ids in enumerate(prompts)]

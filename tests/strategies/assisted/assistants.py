"""Assistants for the tests: one that is often right, one that follows a script, one that counts what it reads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from genctl import events
from genctl.decode.runtime import Output, Pass
from genctl.decode.types import Context, Draft
from genctl.strategies.drafters import DraftWriter, Draw
from genctl.transformers.runtime import TransformersRuntime
from tests.tiny import tiny


@cache
def alike(arch: str, **options: Any) -> Any:
    """A model that often predicts what `tiny(arch)` predicts: the same weights with a little noise."""
    model = copy.deepcopy(tiny(arch, **options))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight += 0.08 * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


@dataclass(frozen=True)
class Scripted:
    """Drafts the next `size` tokens of its script, whatever number is requested."""

    script: tuple[int, ...]
    prompt_len: int
    size: int

    kind: ClassVar[str] = "scripted"

    def begin(self, context: Context, draw: Draw | None, confidence: float) -> DraftWriter:
        return self._draft

    def _draft(self, text: Sequence[int], count: int) -> Draft:
        at = len(text) - self.prompt_len
        return Draft(list(self.script[at : at + self.size]))


class Counting(TransformersRuntime):
    """Records the number of tokens of each pass in `fed`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.fed: list[int] = []

    def __call__(self, given: Pass) -> Output:
        self.fed.append(given.feed.shape[1])
        return super().__call__(given)


def drafts(found: Sequence[events.Event]) -> tuple[int, int]:
    """The total numbers of drafted and accepted tokens."""
    steps = [event for event in found if isinstance(event, events.Stepped)]
    return sum(step.drafted for step in steps), sum(step.accepted for step in steps)


def written(step: events.Stepped) -> tuple[int, ...]:
    """The tokens that a step of a single row wrote."""
    (one,) = (*step.rows, *step.ended)
    return tuple(token.id for token in one.written)

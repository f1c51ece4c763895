"""Tiny checkpoints whose biases are not 0, and sides of them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch

from genctl.parity.measure import measure
from genctl.parity.sides import LocalSide
from genctl.parity.values import Parity
from tests import tiny
from tests.parity.sides import requests_of_ids, side

PROMPTS = ((5, 6, 7, 8), (20, 30), (100, 50, 70))


@cache
def checkpoint(arch: str, folder: Path) -> Path:
    """A tiny checkpoint whose biases are not 0."""
    model = copy.deepcopy(tiny.tiny(arch))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=random) * 0.3)
    return tiny.save(model, folder / arch)


@cache
def reference(arch: str, folder: Path, runtime: str = "auto") -> LocalSide:
    return side(checkpoint(arch, folder), runtime=runtime, generation={"max_new_tokens": 16}, name="reference")


def compared(arch: str, folder: Path, other: LocalSide, runtime: str = "auto", *, layers: bool = False) -> Parity:
    first = reference(arch, folder, runtime)
    return measure(first, other, requests_of_ids(first, PROMPTS), layers=layers)


def other(arch: str, folder: Path, **changes: Any) -> LocalSide:
    return side(checkpoint(arch, folder), width=3, generation={"max_new_tokens": 16}, name="other", **changes)

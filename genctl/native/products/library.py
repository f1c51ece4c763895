"""The compiled library: which variant this CPU runs, and its functions.

`GENCTL_PRODUCTS` names another variant (a slower instruction set), or `torch` for none.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from genctl.errors import UsageError
from genctl.native.products import build

VARIABLE = "GENCTL_PRODUCTS"
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as lanes.h numbers them
FOLDER = build.HERE
OUTDATED = "the compiled products are older than their sources: install again"
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Library:
    """One variant of the library, and the functions that it exports."""

    def __init__(self, path: Path) -> None:
        self.variant, self.path = path.stem, path
        loaded = ctypes.CDLL(str(path))
        loaded.built_from.restype = ctypes.c_char_p
        self.built_from, *self.variants = loaded.built_from().decode().split()  # their digest; what else was compiled
        loaded.runs.argtypes, loaded.runs.restype = (ctypes.c_char_p,), ctypes.c_int
        loaded.suits.argtypes, loaded.suits.restype = (ctypes.c_char_p,), ctypes.c_int
        self._runs, self._suits = loaded.runs, loaded.suits
        self.products = _typed(loaded.products, _POINTER, _INT, _POINTER, _POINTER, _LONG, _INT, _INT)
        self.attention = _typed(loaded.attention, _POINTER, _INT)
        self.rms_norm = _typed(loaded.rms_norm, _POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG, _INT, _INT, _INT)
        self.layer_norm = _typed(
            loaded.layer_norm, _POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG, _LONG, _INT, _INT
        )
        self.activate = _typed(
            loaded.activate, _INT, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _LONG, _INT, _INT
        )
        self.angles = _typed(loaded.angles, _POINTER, _POINTER, _POINTER, _LONG, _INT)
        self.run = _typed(loaded.run, _POINTER, _INT, _LONG, _LONG, _LONG, _INT)
        self.softmax = _typed(loaded.softmax, _INT, _POINTER, _LONG, _POINTER, _LONG, _LONG, _INT)
        self.entropy = _typed(loaded.entropy, _POINTER, _POINTER, _LONG, _LONG, _INT)
        loaded.use_openmp.argtypes, loaded.use_openmp.restype = (_POINTER,), None
        loaded.use_openmp(_openmp())

    def runs(self, variant: str) -> bool:
        """Whether this CPU has the instructions of a variant."""
        return bool(self._runs(variant.encode()))

    def suits(self, variant: str) -> bool:
        """Whether a variant that runs is faster on this CPU than the next one."""
        return bool(self._suits(variant.encode()))


def _typed(function: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


def _openmp() -> int | None:
    """The address of `GOMP_parallel` in the OpenMP that torch has loaded; None where there is none.

    The library then shares torch's threads. A second pool would compete with them for the processor.
    """
    folder = Path(torch.__file__).parent / "lib"
    for path in sorted(path for pattern in ("libgomp*", "libiomp5*", "libomp*") for path in folder.glob(pattern)):
        try:
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, _POINTER).value
    return None


@cache
def _choice() -> tuple[Library | None, str]:
    """The variant to use, and why there is none or a slower one."""
    wanted = os.environ.get(VARIABLE, "")
    known = list(build.variants())
    if wanted and wanted not in (*known, "torch"):
        raise UsageError(f"{VARIABLE}={wanted}: this platform has {', '.join([*known, 'torch'])}")
    if wanted == "torch":
        return None, f"{VARIABLE}=torch"
    if not known:
        return None, "no products are compiled for this platform"
    try:
        base = Library(FOLDER / f"{known[-1]}.so")
    except (OSError, AttributeError):
        return None, "the products of this installation are not compiled"
    if base.built_from != build.digest():
        return None, OUTDATED
    if wanted and wanted not in base.variants:
        there = ", ".join(base.variants)
        raise UsageError(f"{VARIABLE}={wanted}: the compiler of this installation did not know it, only {there}")
    able = [name for name in base.variants if base.runs(name)]
    if wanted and wanted not in able:
        raise UsageError(f"{VARIABLE}={wanted}: this CPU runs {', '.join(able)}")
    name = wanted or next(name for name in able if base.suits(name))
    return base if name == base.variant else Library(FOLDER / f"{name}.so"), ""


def library() -> Library | None:
    """The library; None if torch's products are used. Raises UsageError for a variant that is not there."""
    return _choice()[0]


def why_not() -> str:
    """Why there is no library; "" if there is one."""
    return _choice()[1]


def runnable() -> list[str]:
    """The variants that this CPU runs, best first; empty where none is compiled."""
    found = library()
    return [] if found is None else [name for name in found.variants if found.runs(name)]

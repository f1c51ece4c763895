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
AGAIN = "install again"
OUTDATED = f"the compiled products are older than their sources: {AGAIN}"
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Library:
    """One variant of the library, and the functions that it exports."""

    def __init__(self, path: Path) -> None:
        self.variant, self.path = path.stem, path
        loaded = ctypes.CDLL(str(path))
        loaded.built_from.restype = ctypes.c_char_p
        self.built_from = build.read_mark(loaded.built_from().decode())[0]
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
        cpu = build.Cpu(FOLDER / f"{build.CPU}.so")
    except (OSError, AttributeError):
        return None, "the products of this installation are not compiled"
    if cpu.built_from != build.digest():
        return None, OUTDATED
    if wanted and wanted not in cpu.known:
        raise UsageError(
            f"{VARIABLE}={wanted}: the compiler of this installation did not know it, only {', '.join(cpu.known)}"
        )
    able = [name for name in cpu.known if cpu.runs(name)]
    if wanted and wanted not in able:
        raise UsageError(f"{VARIABLE}={wanted}: this CPU runs {', '.join(able)}")
    if wanted and wanted not in cpu.variants:
        raise UsageError(
            f"{VARIABLE}={wanted}: this installation has {', '.join(cpu.variants)}",
            hint=f"{build.VARIABLE}=runnable compiles all that this CPU runs, when genctl is installed",
        )
    there = [name for name in able if name in cpu.variants]
    if not there:
        return None, f"the products of this installation are for another CPU ({', '.join(cpu.variants)}): {AGAIN}"
    name = wanted or next((name for name in there if cpu.suits(name)), there[0])
    try:
        found = Library(FOLDER / f"{name}.so")
    except (OSError, AttributeError):
        return None, OUTDATED
    return (found, "") if found.built_from == cpu.built_from else (None, OUTDATED)


def library() -> Library | None:
    """The library; None if torch's products are used. Raises UsageError for a variant that is not there."""
    return _choice()[0]


def why_not() -> str:
    """Why there is no library; "" if there is one."""
    return _choice()[1]


def is_unusable() -> bool:
    """Whether there is a library, but not for these sources or this CPU: everything is slow, and nobody chose it."""
    return why_not().endswith(AGAIN)


def runnable() -> list[str]:
    """The variants of this installation that this CPU runs, best first; empty where none is compiled."""
    if library() is None:
        return []
    cpu = build.Cpu(FOLDER / f"{build.CPU}.so")
    return [name for name in cpu.variants if cpu.runs(name)]

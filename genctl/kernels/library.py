"""The compiled library, in the variant that this CPU runs (`variant`), and its functions."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from genctl.kernels import build, variant

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as lanes.h numbers them
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
def _loaded(name: str) -> tuple[Library | None, str]:
    """The library of a variant, or why it cannot be used."""
    try:
        found = Library(variant.file_of(name))
    except (OSError, AttributeError):
        return None, variant.OUTDATED
    return (found, "") if found.built_from == build.digest() else (None, variant.OUTDATED)


def library() -> Library | None:
    """The library; None if torch's products are used. Raises UsageError for a variant that is not there."""
    name = variant.choice()[0]
    return _loaded(name)[0] if name else None


def why_not() -> str:
    """Why there is no library; "" if there is one."""
    name, why = variant.choice()
    return _loaded(name)[1] if name else why


def is_unusable() -> bool:
    """Whether there is a library, but not for these sources or this CPU: everything is slow, and nobody chose it."""
    return why_not().endswith(variant.AGAIN)

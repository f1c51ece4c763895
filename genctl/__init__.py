"""Generate text with transformer checkpoints, and inspect each step.

Public names are imported on first use, so `import genctl` takes no time.
"""

from __future__ import annotations

from genctl.process import __version__

TYPE_CHECKING = False  # importing `typing` takes longer than the rest of this file
if TYPE_CHECKING:
    from typing import Any

    from genctl.api import Model as Model
    from genctl.api import generate as generate
    from genctl.api import load as load
    from genctl.errors import GenctlError as GenctlError
    from genctl.events.results import Result as Result

_HOMES = {
    "Model": "genctl.api",
    "generate": "genctl.api",
    "load": "genctl.api",
    "GenctlError": "genctl.errors",
    "Result": "genctl.events.results",
}

__all__ = ["GenctlError", "Model", "Result", "__version__", "generate", "load"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'genctl' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

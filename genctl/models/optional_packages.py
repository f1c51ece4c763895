"""The packages that only some checkpoints need: which ones, the extra of genctl that installs them, and their absence.

Neither torch nor any of the packages is imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from genctl import errors
from genctl.errors import ModelError
from genctl.models.weights import shown

# quant_method of config.json -> the modules with which transformers loads it, and the extra that has them
_QUANTISED: dict[str, tuple[tuple[str, ...], str]] = {
    "gptq": (("optimum", "gptqmodel"), "gptq"),
    "awq": (("gptqmodel",), "gptq"),
    "compressed-tensors": (("compressed_tensors",), "quant"),
    "torchao": (("torchao",), "quant"),
}


def is_missing(module: str) -> bool:
    """Whether a module is not installed."""
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):
        return True


def require(what: str, modules: tuple[str, ...], extra: str) -> None:
    """Raises ModelError that names the missing packages and the extra `extra`."""
    missing = [name.replace("_", "-") for name in modules if is_missing(name)]
    if missing:
        are = "which is not" if len(missing) == 1 else "which are not"
        raise ModelError(f"{what} needs {' and '.join(missing)}, {are} installed", hint=errors.extra(extra))


def check_quantization(config: Mapping[str, Any]) -> None:
    """Refuse a quantised checkpoint whose packages are missing. Methods that are not listed are left to transformers.

    Raises ModelError.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return
    if not isinstance(settings, dict):
        raise ModelError("config.json: quantization_config is not a JSON object")
    method = settings.get("quant_method")
    if isinstance(method, str) and method in _QUANTISED:
        modules, extra = _QUANTISED[method]
        require(f"config.json says quant_method = {shown(method)}: the checkpoint", modules, extra)

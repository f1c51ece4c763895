"""The part of a page that shows a cache: what `inspect-cache` measured, and beside it what a plan says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LAYER = ("layer", "kind", "shape", "bytes")
_SUMS = ("model", "cache", "total_bytes", "reserved_bytes", "weights_bytes", "bytes_per_token")


def cache_part(report: Mapping[str, Any], planned: Mapping[str, Any] | None) -> dict[str, Any]:
    """The measured layers of each pass, the planned ones, and the heat map if there is one. Inputs are left out."""
    part = {name: report[name] for name in _SUMS}
    part["layers"] = _layers(report)
    part["steps"] = [
        {"step": step["step"], "total_bytes": step["total_bytes"], "layers": _layers(step)} for step in report["steps"]
    ]
    if planned is not None:
        part["planned"] = {"total_bytes": planned["total_bytes"], "layers": _layers(planned)}
    if "heatmap" in report:
        part["heatmap"] = _rounded(report["heatmap"])
    return part


def _layers(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{name: layer[name] for name in _LAYER} for layer in report["layers"]]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value

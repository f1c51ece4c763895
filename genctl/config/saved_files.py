"""What the file of a chat or a tree may set: how text is generated.

Anybody may have written such a file, so it chooses no files, no code and no further checkpoints.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypedDict

from genctl.config.check import names_file
from genctl.config.layers import Layer
from genctl.config.listed_knobs import LISTS

CHECKPOINTS = ("assistant_model", "amateur_model")


class SavedLayer(TypedDict):
    """Settings from one place, as `config.layers.Layer` has them."""

    origin: str
    kind: Literal["model", "user", "command", "row"]
    typed: bool
    values: dict[str, Any]


def saved_layers(layers: Iterable[Layer], allowed: Container[str]) -> tuple[SavedLayer, ...]:
    """The allowed settings of layers. A schema or a grammar is saved as its text: no file is read for it later."""
    saved: list[SavedLayer] = []
    for layer in layers:
        if values := {key: _text(key, value) for key, value in layer.values.items() if key in allowed}:
            saved.append({"origin": layer.origin, "kind": layer.kind, "typed": layer.typed, "values": values})
    return tuple(saved)


def _text(key: str, value: Any) -> Any:
    if key in ("json_schema", "grammar") and names_file(key, value):
        with suppress(OSError, ValueError, RuntimeError):
            return Path(value).expanduser().read_text(encoding="utf-8")
    return value


def objections(values: Mapping[str, Any], allowed: Container[str]) -> dict[str, str]:
    """The settings that a saved file may not bring along, and why: `objection`."""
    return {key: why for key, value in values.items() if (why := objection(key, value, allowed))}


def objection(key: str, value: Any, allowed: Container[str]) -> str:
    """Why a saved file may not set `key` to this value, as the end of "it …"; "" if it may."""
    if key not in allowed:
        return "is no setting of a saved file"
    if key in CHECKPOINTS and value is not None:
        return "names another checkpoint"
    if names_file(key, value):
        return "names a file"
    for table in value if key in LISTS and isinstance(value, (list, tuple)) else ():
        if not isinstance(table, dict) or table.get("use") not in LISTS[key]:
            return "names code that is no part of genctl"
        for name, inner in table.items():
            if name != "use" and (why := objection(name, inner, allowed)):
                return why
    return ""

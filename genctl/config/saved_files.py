"""What the file of a chat or a tree may set: how text is generated.

Anybody may have written such a file, so it chooses no files, no code and no further checkpoints.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from genctl.config.check import names_file
from genctl.config.listed_knobs import LISTS

CHECKPOINTS = ("assistant_model", "amateur_model")


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

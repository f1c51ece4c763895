"""What a golden file may set: how text is generated, and with which checkpoint.

Such a file may come from somebody else. It cannot choose code, a server, or a file to read or write: only the user sets
those, on the command line, in the environment, or in a settings file or preset that the command line names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from genctl.config.check import default, names_file
from genctl.config.listed_knobs import LISTS, code_in
from genctl.config.names import CHECKPOINTS, FILES, NEVER_SAVED, OTHER_MODELS, UNSAFE


def objection(key: str, value: Any) -> str:
    """Why a saved file may not set `key` to this value, as a verb with its object; "" if it may."""
    if key in NEVER_SAVED:
        return NEVER_SAVED[key] if key in UNSAFE or value not in (None, default(key)) else ""
    if key in LISTS:
        tables = [table for table in value if isinstance(table, dict)] if isinstance(value, (list, tuple)) else []
        if code := code_in(key, tables):
            return f"names code ({code})"
        return next(filter(None, (objection(*item) for table in tables for item in table.items())), "")
    if not isinstance(value, str):
        return ""
    if key in CHECKPOINTS and value.startswith(("\\\\", "//")):
        return "names a folder of another machine"
    if key in OTHER_MODELS:
        return "names a checkpoint of the Hub" if may_download(value) else ""
    is_file = key in ("prompt_cache", "draft_corpus") or (key in FILES and names_file(key, value))
    return "names a file" if is_file else ""


def may_download(value: Any) -> bool:
    """Whether a checkpoint is no built-in one and no file of this machine."""
    if not isinstance(value, str):
        return False
    try:
        return not value.startswith("builtin:") and not Path(value).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False

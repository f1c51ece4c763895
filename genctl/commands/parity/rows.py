"""Settings of single rows: a row has the length of its text, and nothing else; sides have the others."""

from __future__ import annotations

from genctl.commands.parity.sides import COMPARED, refused
from genctl.config.check import known
from genctl.config.layers import Resolved, overlay, row_layer
from genctl.io.rows import InputRow

LENGTH = "max_new_tokens"
FIELDS = {"reference", "context", "target"}  # of other commands, and of --texts


def refused_settings(row: InputRow) -> str:
    """Why a row cannot have its settings, or an empty string."""
    keys = sorted({*row.params, *row.extra} - FIELDS - {LENGTH})
    if not keys:
        return ""
    reasons = "; ".join(dict.fromkeys(map(_reason, keys)))
    return f"{row.where}: settings belong to a side, so a row has no {', '.join(keys)} ({reasons})"


def _reason(key: str) -> str:
    if key in COMPARED:
        return f"{key}: write MODEL@{key}=…"
    return refused(key) if key in known() else f"{key}: a prompt has none here"


def own_length(row: InputRow, base: Resolved) -> int | None:
    """The length that a row sets above the settings of all rows; None if it sets none. Raises PresetError."""
    if LENGTH not in row.params:
        return None
    return overlay(base, row_layer({LENGTH: row.params[LENGTH]}, row.where)).generation.max_new_tokens

"""What a prompt lost to --truncate, and a text to its budget, in one line each."""

from __future__ import annotations

from genctl import events as told
from genctl.batch.rows import InputRow
from genctl.params import Runtime


def cut_note(event: told.Event, prompt: str, row: InputRow | None, runtime: Runtime) -> str:
    """What to say when a prompt begins of which tokens were taken; "" for every other event."""
    taken = event.settings.get("truncated", 0) if isinstance(event, told.Began) else 0
    if not taken:
        return ""
    side = runtime.truncate if row is None else row.params.get("truncate", runtime.truncate)
    return f"prompt {prompt}: {taken:,} tokens were taken from it (--truncate {side})"

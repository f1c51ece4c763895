"""Whether a resumed job is still the one that its journal began, and what has changed since."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from genctl.errors import UsageError
from genctl.identity import brief, is_outdated

_SHORT = 40  # characters of a value in a sentence


def check_same(name: str, before: Mapping[str, Any], now: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raises UsageError with everything that has changed between two headers of a journal."""
    changes = differences(before, now, origins)
    if changes:
        raise UsageError(
            f"{name} cannot be resumed: " + "; ".join(changes),
            hint="ask the same as before, or give another --output; --force instead of --resume starts anew",
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """What differs between two headers, in words: old → new where that is short."""

    def setting(key: str, old: Any, new: Any) -> str:
        place = origins.get(key, "default")
        return _change(key, old, new) + (f" ({place})" if place != "default" else "")

    sentences: dict[str, Callable[[str, Any, Any], str]] = {
        "versions": _change,
        "settings": setting,
        "seed": _change,
        "format": lambda key, old, new: _change("--format", old, new),
        "records": lambda key, old, new: _change(_FLAGS.get(key, key), old, new),
        "checkpoints": _checkpoint,
        "files": lambda key, old, new: f"the file that {key} names has changed",
    }
    changes = []
    for part, sentence in sentences.items():
        old, new = (value if isinstance(value := header.get(part), dict) else {part: value} for header in (before, now))
        keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
        changes += [sentence(key, old.get(key), new.get(key)) for key in keys]
    if not any(changes) and before.get("batch") != now["batch"]:
        changes.append(_change("rows decoded together", _together(before.get("batch")), _together(now["batch"])))
    return [change for change in changes if change]  # the input is compared row by row (see `Resumable.consume`)


def _together(batch: Any) -> str:
    """How rows share a pass, in words."""
    batch = batch if isinstance(batch, dict) else {}
    if "numbers" in batch:
        return f"in any number ({batch['numbers']})"
    return str(batch["width"]) if "width" in batch else "unset"


_FLAGS = {
    "echo": "--echo",
    "template": "--template",
    "tokens": "--scores",
    "top": "--top-logprobs",
    "explain": "--explain",
    "watch": "--watch",
    "fail_on": "--fail-on",
}


def _change(key: str, old: Any, new: Any) -> str:
    return f"{key} {_words(old)} → {_words(new)}"


def _words(value: Any) -> str:
    if value is None:
        return "unset"
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= _SHORT else text[: _SHORT - 1] + "…"


def _checkpoint(name: str, old: Any, new: Any) -> str:
    if old is None or new is None:
        return ""  # another name is another setting, which is listed already
    if is_outdated(old):
        return (
            "it was begun with a version of genctl that did not look at all bytes of a checkpoint, so nobody can tell "
            f"whether {name} is still the same"
        )
    return f"the checkpoint {name} has changed ({brief(old)} → {brief(new)})"

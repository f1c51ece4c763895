"""Whether a resumed job is still the one that its journal began, and what has changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from genctl.errors import UsageError
from genctl.identity import change, changed, checkpoint_change


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
        return change(key, old, new, "" if place == "default" else place)

    sentences: dict[str, Callable[[str, Any, Any], str]] = {
        "versions": change,
        "settings": setting,
        "seed": change,
        "format": lambda key, old, new: change("--format", old, new),
        "records": lambda key, old, new: change(_FLAGS.get(key, key), old, new),
        "checkpoints": _checkpoint,
        "files": lambda key, old, new: f"the file that {key} names has changed",
    }
    changes = []
    for part, sentence in sentences.items():
        old, new = (value if isinstance(value := header.get(part), dict) else {part: value} for header in (before, now))
        changes += [sentence(*difference) for difference in changed(old, new)]
    if not any(changes) and before.get("batch") != now["batch"]:
        changes.append(change("rows decoded together", _together(before.get("batch")), _together(now["batch"])))
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


def _checkpoint(name: str, old: Any, new: Any) -> str:
    # another name is another setting, which is listed already
    return "" if old is None or new is None else checkpoint_change(name, old, new)

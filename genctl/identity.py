"""What numbers depend on, for comparing it later: checkpoints (`models.fingerprint`) and versions.

This file imports nothing at first: `genctl --version` is answered before anything is imported.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

__version__ = "0.3.0"
PREFIX = "sha256:"  # fingerprints of the first version were bare hex, and saw a sample of each tensor only
_SHORT = 40  # characters of a value in a sentence


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The keys whose values differ, with both of them; None where there is none."""
    keys = dict.fromkeys([*old, *new])
    return ((key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key))


def change(name: str, old: Any, new: Any, place: str = "") -> str:
    """What has changed, in words: `temperature 0.7 → 0.8 (flag --temperature)`, with the place of the new value."""
    return f"{name} {_words(old)} → {_words(new)}" + (f" ({place})" if place else "")


def checkpoint_change(name: str, old: object, new: str, *, before: str = "", what: str = "it") -> str:
    """How a checkpoint differs from the one that `what` was made with, by fingerprints; its name was `before`."""
    if not (isinstance(old, str) and old.startswith(PREFIX)):  # it may be equal for different weights
        seen = "made by a version of genctl that did not look at all bytes of a checkpoint"
        return f"{what} was {seen}, so it is unknown whether {name} is still the same"
    then, now = (f"{fingerprint.removeprefix(PREFIX):.12}…" for fingerprint in (old, new))
    if before not in ("", name):
        return f"{what} was made with {before} ({then}), and {name} is another checkpoint ({now})"
    return f"the checkpoint {name} has changed ({then} → {now})"


def _words(value: Any) -> str:
    import json

    if value is None:
        return "unset"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if text.isprintable() else json.dumps(value)
    return text if len(text) <= _SHORT else text[: _SHORT - 1] + "…"


# -- whether a resumed job is still the one that its journal began, and what has changed since -------------------------


def check_same(name: str, before: Mapping[str, Any], now: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raises UsageError with everything that has changed between two headers of a journal."""
    changes = differences(before, now, origins)
    if changes:
        from genctl.errors import UsageError

        raise UsageError(
            f"{name} cannot be resumed: " + "; ".join(changes),
            hint="use the same options as before, or another --output; --force instead of --resume starts over",
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """What differs between two headers, in words. The input is compared row by row (see `Resumable.consume`)."""
    changes = []
    for part in ("versions", "settings", "seed", "format", "records", "checkpoints", "files"):
        old, new = (value if isinstance(value := header.get(part), dict) else {part: value} for header in (before, now))
        for key, was, is_now in changed(old, new):
            if part == "files":
                changes.append(f"the file that {key} names has changed")
            elif part != "checkpoints":
                place = origins.get(key, "default") if part == "settings" else "default"
                name = _FLAGS.get(key, key) if part in ("format", "records") else key
                changes.append(change(name, was, is_now, "" if place == "default" else place))
            elif None not in (was, is_now):  # another name is another setting, which is listed already
                changes.append(checkpoint_change(key, was, is_now))
    if not changes and before.get("batch") != now["batch"]:
        changes.append(change("rows decoded together", _together(before.get("batch")), _together(now["batch"])))
    return changes


def _together(batch: Any) -> str:
    """How rows share a pass, in words."""
    batch = batch if isinstance(batch, dict) else {}
    if "numbers" in batch:
        return f"in any number ({batch['numbers']})"
    return str(batch["width"]) if "width" in batch else "unset"


_FLAGS = {
    "format": "--format",
    "echo": "--echo",
    "template": "--template",
    "tokens": "--scores",
    "top": "--top-logprobs",
    "explain": "--explain",
    "watch": "--watch",
    "fail_on": "--fail-on",
}


def versions(*packages: str) -> dict[str, str]:
    """The versions of genctl and of `packages`."""
    from importlib import metadata

    found = {"genctl": __version__}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def sources() -> str:
    """A digest of genctl's own sources, as they lie beside this file."""
    from hashlib import sha256
    from pathlib import Path

    home = Path(__file__).parent
    whole = sha256()
    for path in sorted(path for kind in ("py", "c", "h") for path in home.rglob(f"*.{kind}")):
        whole.update(f"{path.relative_to(home).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:12]

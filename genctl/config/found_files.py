"""The knobs that found files may set: settings files and presets outside the user's own folder.

Such a file may come with somebody else's folder. It may choose how text is generated, and from which data. It may not
choose servers or places to write, and code that it names does not run. Only the user sets those: on the command line,
in the environment, or in the files of `config_home`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from genctl.config.check import shown
from genctl.errors import UsageError
from genctl.params import spelled

if TYPE_CHECKING:
    from genctl.config.conflicts import Setting

# Knob -> why a found file may set it only to a value that the user sets too.
CONFIRMED = {
    "backend": "decides who gets the prompts and the key",
    "offload_folder": "names a folder to write to",
}

# Knobs that name what is loaded. It is data: pickles, plugins and Python files run only with the flags of `TRUST`.
LOADED = frozenset(
    {
        "model", "revision", "tokenizer", "adapter", "assistant_model", "amateur_model", "prompt_cache", "json_schema",
        "grammar", "processors", "stopping",
    }
)  # fmt: skip

# Flag that lets code run -> the knobs that name the code. With the flag, an unnamed file may not set them.
_CHECKPOINTS = ("model", "revision", "tokenizer", "adapter", "assistant_model", "amateur_model", "prompt_cache")
TRUST: dict[str, Sequence[str]] = {
    "allow_pickle": _CHECKPOINTS,
    "trust_remote_code": _CHECKPOINTS,
    "allow_plugins": ("processors", "stopping"),
}

# Knobs without an effect outside the run.
INSIDE = frozenset(
    {
        "dry_sequence_breakers", "negative_prompt", "watermarking_config", "bad_words", "logit_bias", "regex", "prefix",
        "force_words", "stop_strings", "stop_regex", "device", "device_map", "max_memory", "system",
    }
)  # fmt: skip


def mistakes(settings: Mapping[str, Setting], named: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str]]:
    """The forbidden settings of found files, each as a sentence and a hint. `named` holds the user's values."""
    for key, setting in settings.items():
        if not setting.found:
            continue
        setting_text = f"{setting.place}: {key} = {shown(setting.value)}"
        if key in CONFIRMED:
            yield (
                f"{setting_text}: {CONFIRMED[key]}, which a file of this folder cannot choose",
                f"to use it, name it yourself: --{spelled(key)}, GENCTL_{key.upper()} or "
                "$XDG_CONFIG_HOME/genctl/config.toml",
            )
        elif key == "offline" and setting.value is False and True in named.get(key, ()):
            yield f"{setting_text}: a file of this folder cannot switch the network on", ""
        elif key in LOADED and isinstance(setting.value, str) and setting.value.startswith(("\\\\", "//")):
            yield f"{setting_text}: a file of this folder cannot name a folder of another machine", ""


def confirmed(key: str, value: Any, named: Sequence[Any]) -> bool:
    """Whether the user has set each part of this value too."""
    try:
        return set(_parts(value)) <= set(_parts(named))
    except TypeError:  # tables cannot be compared as members of a set
        return value in named


def check_trust(settings: Mapping[str, Setting], trust: Mapping[str, bool]) -> None:
    """Raises UsageError if a flag would run code that an unnamed file has chosen."""
    problems = [
        f"--{flag.replace('_', '-')} would run code that {setting.place} names: {key} = {shown(setting.value)}"
        for flag, keys in TRUST.items()
        if trust.get(flag)
        for key in keys
        if (setting := settings.get(key)) is not None and setting.found == "unnamed"
    ]
    if problems:
        raise UsageError(
            "\n".join(problems),
            hint="name it on the command line too: by its flag, or with --preset a file that sets it",
        )


def _parts(value: Any) -> Iterable[Any]:
    """The parts of a value: those of a list, of lists in it, or the value itself."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item)
    else:
        yield value

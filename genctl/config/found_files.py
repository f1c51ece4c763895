"""What a file may set that the user has not written: a settings file or preset outside the user's own folder.

Such a file may come with a folder that somebody else made. It may choose how text is generated, and from which data. It
may not choose whom to talk to or where to write, and no code of what it names runs. The user decides that: on the
command line, in the environment, or in the files of `config_home`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from genctl.config.check import shown
from genctl.errors import UsageError
from genctl.params import spelled

if TYPE_CHECKING:
    from genctl.config.conflicts import Setting

# Knobs that a found file may set only to a value that the user names too -> why.
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

# Flags that let code run -> the knobs that name it. With the flag, a file that nobody named may not set them.
_CHECKPOINTS = ("model", "revision", "tokenizer", "adapter", "assistant_model", "amateur_model", "prompt_cache")
TRUST: dict[str, Sequence[str]] = {
    "allow_pickle": _CHECKPOINTS,
    "trust_remote_code": _CHECKPOINTS,
    "allow_plugins": ("processors", "stopping"),
}

# Knobs whose text reaches nothing outside the run.
INSIDE = frozenset(
    {
        "dry_sequence_breakers", "negative_prompt", "watermarking_config", "bad_words", "logit_bias", "regex", "prefix",
        "force_words", "stop_strings", "stop_regex", "device", "device_map", "max_memory", "system",
    }
)  # fmt: skip


def mistakes(settings: Mapping[str, Setting], named: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str]]:
    """What found files have set and may not, each as a sentence and a hint. `named` holds the values of the user."""
    for key, setting in settings.items():
        if not setting.found:
            continue
        said = f"{setting.place}: {key} = {shown(setting.value)}"
        if key in CONFIRMED:
            yield (
                f"{said}: {CONFIRMED[key]}, which a file of this folder cannot choose",
                f"to use it, name it yourself: --{spelled(key)}, GENCTL_{key.upper()} or "
                "$XDG_CONFIG_HOME/genctl/config.toml",
            )
        elif key == "offline" and setting.value is False and True in named.get(key, ()):
            yield f"{said}: a file of this folder cannot switch the network on", ""
        elif key in LOADED and isinstance(setting.value, str) and setting.value.startswith(("\\\\", "//")):
            yield f"{said}: a file of this folder cannot name a folder of another machine", ""


def confirmed(key: str, value: Any, named: Sequence[Any]) -> bool:
    """Whether the user names each part of a value that a found file has set."""
    try:
        return set(_each(value)) <= set(_each(named))
    except TypeError:  # tables cannot be compared as members of a set
        return value in named


def check_trust(settings: Mapping[str, Setting], trust: Mapping[str, bool]) -> None:
    """Raises UsageError where a flag lets code run that a file has chosen which nobody named."""
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


def _each(value: Any) -> Iterable[Any]:
    """The parts of a value: those of a list, of lists in it, or the value itself."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _each(item)
    else:
        yield value

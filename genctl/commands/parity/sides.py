"""The sides of a comparison: `MODEL[@setting=value,…]` and `openai:URL[@setting=value,…]`, each with settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from genctl import params
from genctl.config.check import did_you_mean, known, named
from genctl.config.inline import read_knobs
from genctl.config.layers import Layer, Resolved, RunSpec, each
from genctl.errors import GenctlError, UsageError
from genctl.params import Generation, Runtime

SERVER = "openai:"
RESUME = "resume"  # no knob of a run: rows from here on are decoded by a run that continues another
_KNOBS = re.compile(r"@(?=\s*[A-Za-z_][\w-]*\s*=)")

# Knobs of decoding that must not change what the model computes: with or without them greedy texts should be equal.
SPECULATION = (
    "assistant_model",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "assistant_early_exit",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
)
DECODING = (*SPECULATION, "use_cache", "cache_implementation")
COMPUTING = (
    "model", "revision", "tokenizer", "device", "dtype", "device_map", "max_memory", "offload_folder", "adapter",
    "merge_adapter", "pack", "quantize", "compile", "runtime", "threads", "batch_size", "prompt_cache",
)  # fmt: skip
COMPARED = (*COMPUTING, *DECODING, RESUME)
OF_SERVERS = ("model", "tokenizer", "batch_size")
DECLARED = ("dtype", "quantize")  # of a server: not set, but said of it, for what they explain

# Why the others cannot matter, by group; some have a reason of their own.
_REASONS = {
    "seed": "greedy texts are compared, so nothing draws",
    "offline": "it decides where files come from, not what they compute; --offline holds for all sides",
    "backend": "write a server as openai:URL",
    "tensor_parallel": "a side is one process; compare the output of such a run with genctl compare",
    "row_timeout": "it ends rows and computes nothing",
    "truncate": "all sides read the same prompts; --truncate holds for all sides",
    "chat": "all sides read the same prompts; --chat holds for all sides",
    "system": "all sides read the same prompts; --system holds for all sides",
}
_GROUP_REASONS = {
    params.LENGTH: "all sides have the same length; --max-new-tokens holds for all sides",
    params.SAMPLING: "greedy texts are compared, so nothing draws",
    params.STOPPING: "texts of all sides end alike",
}
_CHOOSES = "it changes which token is chosen, not what the model computes; genctl compare shows such differences"


@dataclass(frozen=True)
class Side(RunSpec):
    """One side. Its name is what was typed."""

    resume: int | None = None  # rows that an earlier run has decoded, where this one continues it
    declared: Layer | None = None  # what a server is said to compute with

    what: ClassVar[str] = "side"


def names_model(early: Resolved) -> bool:
    """Whether a setting of a side names its model."""
    return early.origins.get("model", "default") != "default"


def split_side(text: str) -> tuple[str, str]:
    """The model and the knobs of a side, at the first @ with `name=` behind it; other @ belong to the model."""
    found = _KNOBS.search(text)
    return (text, "") if found is None else (text[: found.start()], text[found.end() :])


def is_prompt(text: str) -> bool:
    """Whether an argument is a prompt: it has white space, and neither knobs nor a file or folder of this name."""
    if not any(letter.isspace() for letter in text) or split_side(text)[1]:
        return False
    try:
        return not Path(text).exists()
    except (OSError, ValueError):
        return True


def read_sides(texts: Sequence[str], beneath: Sequence[Layer]) -> tuple[Side, ...]:
    """The sides of the command line, above the layers of all sides. Raises UsageError or PresetError: all mistakes."""
    sides: list[Side] = []
    mistakes: list[GenctlError] = []
    for text in texts:
        try:
            sides.append(read_side(text, beneath))
        except GenctlError as error:
            mistakes.append(error)
    each(sides, Side.early, mistakes)
    return tuple(sides)


def read_side(text: str, beneath: Sequence[Layer]) -> Side:
    """One side. Raises UsageError with all its mistakes."""
    model, knobs = split_side(text)
    model, place = model.strip(), f"side {text}"
    declared: dict[str, Any] = {}
    values = read_knobs(knobs, place, (RESUME, "cache"))
    if "cache" in values:  # the flag of this knob
        values.setdefault("cache_implementation", values.pop("cache"))
    wrong = [f"{place}: {sentence}" for key in values if (sentence := refused(key))]
    if not model and not knobs:
        wrong.append(f"{place}: names neither a model nor a setting")
    if model and "model" in values and not model.startswith(SERVER):
        wrong.append(f"{place}: the model is said twice, as {model} and as model = {values['model']}")
    if model.startswith(SERVER):
        # what a server loads is not ours to choose
        wrong += [
            f"{place}: {key} is for a checkpoint here; a server has already loaded its own"
            for key in values
            if key in COMPARED and key not in (*OF_SERVERS, *DECLARED)
        ]
        declared = {key: values.pop(key) for key in DECLARED if key in values}
        values["backend"] = model
    elif model:
        values["model"] = model
    resume = values.pop(RESUME, None)
    if resume is not None and (isinstance(resume, bool) or not isinstance(resume, int) or resume < 1):
        wrong.append(f"{place}: resume = {resume}: must be a number of rows, at least 1")
    if wrong:
        raise UsageError("\n".join(wrong), hint=_hint(values))
    layer = Layer(place, values, said="user", typed=True)
    return Side(
        text,
        (*beneath, *([layer] if values else ())),
        resume=resume,
        declared=Layer(place, declared, said="user", typed=True) if declared else None,
    )


def _hint(values: Iterable[str]) -> str:
    return "" if all(key in known() for key in values) else f"a side takes {', '.join(COMPARED)}"


def refused(key: str) -> str:
    """Why a comparison takes no such knob of a side, or an empty string."""
    if key in COMPARED:
        return ""
    if key not in known():
        near = did_you_mean(key, COMPARED) or did_you_mean(key, known())
        return f"unknown setting {named(key)}" + (f"; did you mean {near}?" if near else "")
    item = {**params.knobs(Generation), **params.knobs(Runtime)}[key]
    reason = _REASONS.get(key) or _GROUP_REASONS.get(item.metadata["group"], _CHOOSES)
    return f"{key} cannot matter to a comparison: {reason}"


def unused(resolved: Resolved) -> list[str]:
    """Notes on settings of files and variables that a comparison does not use: they only choose among tokens."""
    used = {*COMPARED, "backend", "offline", "truncate", "chat", "system", "seed", "max_new_tokens"}
    notes = []
    for kind, values in ((Generation, resolved.generation), (Runtime, resolved.runtime)):
        for key, item in params.knobs(kind).items():
            value: Any = getattr(values, key)
            setting = resolved.settings.get(key)
            if key in used or setting is None or setting.kind == "model" or value in (item.default, None):
                continue
            if item.metadata["neutral"] is None or value != item.metadata["neutral"]:
                notes.append(f"{key} ({setting.place}) is not used: it only chooses among the tokens, greedily here")
    return notes

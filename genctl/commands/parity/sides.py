"""The sides of `genctl parity`: which settings may differ between them, and which may be those of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from genctl import params
from genctl.config import presets
from genctl.config.check import did_you_mean, known, named
from genctl.config.layers import Layer, Resolved, overlay, row_layer
from genctl.config.sides import LOADING, Kind, Side, check, exists, read, split
from genctl.errors import GenctlError, UsageError, hide_secrets
from genctl.io.rows import InputRow
from genctl.params import Generation, Runtime

KINDS: tuple[Kind, ...] = ("server", "file", "checkpoint", "mode", "preset")  # a name that is no other is a checkpoint
REFUSED: dict[Kind, str] = {
    "file": "a file of results is the reference: give one, first, as --expect does",
    "mode": "greedy texts are compared here; genctl compare --strategy compares ways to decode",
}

# Knobs of decoding that must not change what the model computes: with or without them greedy texts should be equal.
SPECULATION = (
    "assistant_model",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "assistant_early_exit",
    "num_assistant_tokens",
    "assistant_confidence_threshold",
)
DECODING = (*SPECULATION, "use_cache", "cache_implementation")
# Why the others cannot matter, by group; some have a reason of their own.
_REASONS = {
    "seed": "greedy texts are compared, so nothing draws",
    "offline": "it decides where files come from, not what they compute; --offline holds for all sides",
    "backend": "a server cannot be a side; genctl audit compares it with a checkpoint",
    "tensor_parallel": "a side is one process; compare the output of such a run with genctl compare",
    "row_timeout": "it ends rows and computes nothing",
    "truncate": "all sides read the same prompts; --truncate holds for all sides",
    "chat": "all sides read the same prompts; --chat holds for all sides",
    "system": "all sides read the same prompts; --system holds for all sides",
}
COMPARED = (*(key for key in LOADING if key not in _REASONS), "batch_size", "prompt_cache", *DECODING)
BY_TEXT = "--by-text compares bits per byte of the texts alone"  # what may help where tokens differ
_GROUP_REASONS = {
    params.LENGTH: "all sides have the same length; --max-new-tokens holds for all sides",
    params.SAMPLING: "greedy texts are compared, so nothing draws",
    params.STOPPING: "texts of all sides end alike",
}
_CHOOSES = "it changes which token is chosen, not what the model computes; genctl compare shows such differences"


def is_prompt(text: str) -> bool:
    """Whether an argument is a prompt: it has white space, and neither settings nor a file or folder of this name."""
    return any(letter.isspace() for letter in text) and not split(text)[1] and not exists(text)


def read_sides(texts: Sequence[str], beneath: Sequence[Layer]) -> tuple[Side, ...]:
    """The sides of the command line, above the layers of all sides. Raises UsageError or PresetError: all mistakes."""
    sides: list[Side] = []
    mistakes: list[GenctlError] = []
    for text in texts:
        try:
            sides.append(read_side(text, beneath))
        except GenctlError as error:
            mistakes.append(error)
    check(sides, mistakes)
    return tuple(sides)


def read_side(text: str, beneath: Sequence[Layer]) -> Side:
    """One side. Raises UsageError with all its mistakes."""
    side = read(text, "side", KINDS, refused=REFUSED, bare="checkpoint")
    place = side.origin
    if side.kind == "server":
        raise _no_server(place, side.what)
    wrong = [f"{place}: {sentence}" for key in side.settings if (sentence := refused(key))]
    if wrong:
        are_known = all(key in known() for key in side.settings)
        raise UsageError("\n".join(wrong), hint="" if are_known else f"a side takes {', '.join(COMPARED)}")
    side = replace(side, word="side", layers=(*beneath, *presets.load(side.presets), *side.own()))
    if layer := next((one for one in side.layers if one.values.get("backend") is not None), None):
        raise _no_server(f"{side.place}: backend ({layer.place('backend')})", "URL")
    return side


def _no_server(place: str, url: str) -> UsageError:
    return UsageError(
        f"{place}: a server cannot be a side: it reports only its most probable tokens",
        hint=f"genctl audit {hide_secrets(url)} -m MODEL compares what a server computes with a checkpoint",
    )


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
    used = {*COMPARED, "offline", "truncate", "chat", "system", "seed", "max_new_tokens"}
    notes = []
    for kind, values in ((Generation, resolved.generation), (Runtime, resolved.runtime)):
        for key, item in params.knobs(kind).items():
            value, setting = getattr(values, key), resolved.settings.get(key)
            if key in used or setting is None or setting.kind == "model" or value in (item.default, None):
                continue
            if item.metadata["neutral"] is None or value != item.metadata["neutral"]:
                notes.append(f"{key} ({setting.place}) is not used: it only chooses among the tokens, greedily here")
    return notes


# -- settings of single rows: a row has the length of its text, and nothing else; sides have the others ----------------

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

"""The commands of a tree as lines of text: one parser for scripts, for chat and for the screen.

A line is a name and its arguments. Everything that needs no checkpoint is checked here, so that a script is checked
whole before anything is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from genctl.config import presets
from genctl.config.check import Wrong, check, did_you_mean, known, shown
from genctl.config.found_files import hint, objection
from genctl.config.presets import parse_value
from genctl.errors import PresetError, UsageError, nearest

MEMORY = 2**30  # bytes for caches and scores, where nobody says how many
Arguments: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True)
class Call:
    """A command with its arguments, ready to be done."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    line: str = ""  # as it was written


@dataclass(frozen=True)
class Word:
    """A command that there is."""

    usage: str  # its name and its arguments
    about: str
    read: Callable[[str], Arguments]
    needs_text: bool = False  # whether it needs a tokenizer


def parse(line: str) -> Call:
    """The command of a line. Raises UsageError, naming the nearest command for one that there is not."""
    name, _, rest = line.strip("\r\n").lstrip().partition(" ")
    if name not in WORDS:
        near = nearest(name, WORDS)
        raise UsageError(f"unknown command {name!r:.60}" + (f"; did you mean {near}?" if near else ""))
    try:
        # the text of `edit` begins after one blank
        arguments = WORDS[name].read(rest if name == "edit" else rest.strip())
    except ValueError as error:
        raise UsageError(f"{name}: {error}; expected {WORDS[name].usage}") from None
    return Call(name, arguments, line.strip("\r\n"))


def parse_script(lines: Iterable[str], name: str) -> list[Call]:
    """The commands of a script, one on each line; empty lines and those that begin with # are skipped.

    Raises UsageError with every line that cannot be read, by its number.
    """
    calls, mistakes = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            calls.append(parse(line.lstrip()))
        except UsageError as error:
            mistakes.append(f"{name}, line {number}: {error.message}")
    if mistakes:
        raise UsageError("\n".join(mistakes), hint=f"the commands are {', '.join(WORDS)}")
    return calls


# -- arguments ---------------------------------------------------------------------------------------------------------


def _nothing(rest: str) -> Arguments:
    if rest:
        raise ValueError(f"takes nothing, got {rest!r:.60}")
    return {}


def _whole(text: str, least: int, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise ValueError(f"{what} is a number from {least} on, not {text!r:.60}")
    return int(text)


def _count(name: str, default: int | None, least: int = 1) -> Callable[[str], Arguments]:
    def read(rest: str) -> Arguments:
        return {name: _whole(rest, least, name) if rest else default}

    return read


def _taken(rest: str) -> Arguments:
    """A token and how many follow it: a rank, id:N, or a text in quotes."""
    if rest.startswith('"'):
        try:
            text, end = json.JSONDecoder().raw_decode(rest)
        except ValueError:
            raise ValueError(f"{rest!r:.60} has no closing quote") from None
        token, more = text, rest[end:].strip()
    else:
        first, _, more = rest.partition(" ")
        number = first.removeprefix("id:")
        token = first if number != first and _whole(number, 0, "an id") >= 0 else _whole(first, 1, "a rank")
        more = more.strip()
    return {"token": token, "n": _whole(more, 0, "n") if more else None}


def _text(rest: str) -> Arguments:
    """A text: in quotes with the escapes of JSON, else as it is."""
    text: Any = rest
    if rest.startswith('"'):
        try:
            text = json.loads(rest)
        except ValueError:
            raise ValueError(f"{rest!r:.60} has no closing quote, or an escape that JSON lacks") from None
    if not text:
        raise ValueError("there is no text")
    return {"text": text}


def _node(rest: str) -> Arguments:
    if not rest or " " in rest:
        raise ValueError(f"one bookmark or number of a node, not {rest!r:.60}")
    return {"name": rest}


def _mark(rest: str) -> Arguments:
    if " " in rest or (rest.isascii() and rest.isdigit()):
        raise ValueError(f"{rest!r:.60} is not a name: one word, not a number")
    return {"name": rest}


def _two(rest: str) -> Arguments:
    names = rest.split()
    if not 1 <= len(names) <= 2:
        raise ValueError("one or two branches, by bookmark or node")
    return {"names": tuple(names)}


def _threshold(rest: str) -> Arguments:
    try:
        value = float(rest) if rest else 1.0
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1e6:
        raise ValueError(f"an entropy in nats, not {rest!r:.60}")
    return {"entropy": value}


def _knobs(rest: str) -> Arguments:
    found = re.fullmatch(r"([\w-]+)(?:\s*=|\s)\s*(.*)", rest, re.DOTALL)
    if found is None:
        raise ValueError(f"got {rest!r:.60}")
    key, value = found[1].replace("-", "_"), found[2]
    if key not in known():
        near = did_you_mean(key, known())
        raise ValueError(f"unknown setting {key!r:.60}" + (f"; did you mean {near}?" if near else ""))
    read = parse_value(key, value.strip())
    try:
        return {"key": key, "value": check(key, read)}
    except Wrong as wrong:
        raise ValueError(str(wrong)) from None


def _name(rest: str) -> Arguments:
    if not rest:
        raise ValueError("there is no name")
    return {"name": rest}


def preset_values(name: str) -> dict[str, Any]:
    """The knobs of a preset. Raises PresetError, also for what a preset of somebody else may not set."""
    values: dict[str, Any] = {}
    for layer in presets.load([name]):
        for error in layer.broken:
            raise error
        for key, value in layer.values.items():
            if (wrong := objection(key, value, layer.folder, layer.found, opened=layer.found == "unnamed")) is not None:
                raise PresetError(f"{layer.place(key)}: {key} = {shown(value)}: {wrong.sentence}", hint=hint(key))
        values |= layer.values
    values.pop("about", None)
    return values


def expansion(text: str) -> Arguments:
    """`mass=0.9,depth=6`: either or both. Raises ValueError."""
    found: Arguments = {"mass": 1.0, "depth": None}
    given = set()
    for part in filter(None, text.replace(" ", ",").split(",")):
        key, equals, value = part.partition("=")
        if key in given or key not in ("mass", "depth", "nodes") or not equals:
            raise ValueError(f"{part!r:.60} is not one of mass=SHARE, depth=N, nodes=N, each once")
        given.add(key)
        if key == "mass":
            try:
                found["mass"] = float(value)
            except ValueError:
                found["mass"] = -1.0
            if not 0.0 < found["mass"] <= 1.0:
                raise ValueError(f"mass is above 0 and at most 1, not {value!r:.60}")
        else:
            found[key] = _whole(value, 1, key)
    if "depth" not in given:
        raise ValueError("there is no depth=N, and a text may have no end")
    return found


def _both(rest: str) -> Arguments:
    words = rest.split()
    if len(words) > 2:
        raise ValueError(f"two numbers at most, not {rest!r:.60}")
    return {"k": _whole(words[0], 1, "K") if words else 4, "n": _whole(words[1], 1, "N") if len(words) > 1 else None}


WORDS: dict[str, Word] = {
    "left": Word("left [N]", "the token before", _count("n", 1)),
    "right": Word("right [N]", "the next token of the branch", _count("n", 1)),
    "up": Word("up", "the branch above, of those that part at the cursor", _nothing),
    "down": Word("down", "the branch below", _nothing),
    "start": Word("start", "the beginning: the end of the prompt", _nothing),
    "end": Word("end", "the end of the branch", _nothing),
    "goto": Word("goto NODE", "a node, by its number or its bookmark", _node),
    "next": Word("next [NATS]", "the next token chosen with at least this entropy (1)", _threshold),
    "previous": Word("previous [NATS]", "the one before", _threshold),
    "take": Word('take RANK|id:N|"TEXT" [N]', "this token, and N more (max_new_tokens; 0: no more)", _taken),
    "generate": Word("generate [N]", "continue from the cursor by N tokens", _count("n", None)),
    "sample": Word("sample [K] [N]", "K continuations from the cursor, each with its own seed", _both),
    "beams": Word("beams [K] [N]", "the K best continuations from the cursor that a beam search finds", _both),
    "edit": Word("edit TEXT", "another text from the cursor on", _text, needs_text=True),
    "expand": Word("expand mass=SHARE,depth=N", "all continuations by joint probability", expansion),
    "undo": Word("undo", "take back the last step", _nothing),
    "redo": Word("redo", "do it again", _nothing),
    "set": Word("set KNOB=VALUE", "a setting of what follows; the distribution changes at once", _knobs),
    "preset": Word("preset NAME", "the settings of a preset", _name),
    "reset": Word("reset", "the settings that the tree began with", _nothing),
    "bookmark": Word("bookmark [NAME]", "name the node at the cursor; without a name, one is made", _mark),
    "show": Word(
        "show [N]", "the N most probable tokens at the cursor, and what processors made of them", _count("n", 20)
    ),
    "find": Word("find TEXT", "the tokens at the cursor that have this text", _text, needs_text=True),
    "why": Word("why", "what each processor did to the token at the cursor", _nothing),
    "layers": Word("layers", "what the model would say after each of its layers", _nothing),
    "compare": Word("compare A [B]", "two branches side by side (B: the current one)", _two),
    "beside": Word("beside", "both distributions of --models or --beside, token by token", _nothing),
    "text": Word("text", "the text of the branch", _nothing),
    "copy": Word("copy", "the same, for the clipboard", _nothing),
    "repeat": Word("repeat", "the genctl command line that writes this branch again", _nothing),
}

"""The commands of a tree, a row each: one language for scripts, for the line of the screen and for its keys.

A line is a name and its arguments. Everything that needs no checkpoint is checked here, so that a script is checked
whole before anything is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, TypeAlias

from genctl.config.check import Wrong, check, did_you_mean, known
from genctl.config.presets import parse_value
from genctl.errors import UsageError, nearest

MEMORY = 2**30  # bytes for caches and scores, where nobody says how many
Arguments: TypeAlias = "dict[str, Any]"

# What a command does: it moves the cursor; writes a branch, which the cursor follows; writes several; goes back or
# forth in what was done; changes settings; names a node; only looks.
Kind: TypeAlias = Literal["move", "write", "fork", "back", "set", "name", "look"]


@dataclass(frozen=True)
class Call:
    """A command with its arguments, ready to be done."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    line: str = ""  # as it was written


@dataclass(frozen=True)
class TreeCommand:
    """A command that there is."""

    usage: str  # its name and its arguments
    about: str
    read: Callable[[str], Arguments]
    kind: Kind
    does: str  # module and function of this package. A move takes (tree, At, …) to an At, others yield from an Explorer

    @property
    def name(self) -> str:
        """The first word of a line."""
        return self.usage.partition(" ")[0]

    @property
    def function(self) -> Callable[..., Any]:
        """Its function, which has its name where `does` gives none. Imports what runs the model."""
        module, _, name = self.does.partition(".")
        found: Callable[..., Any] = getattr(import_module(f"genctl.tree.{module}"), name or self.name)
        return found


def parse(line: str) -> Call:
    """The command of a line. Raises UsageError, naming the nearest command for one that there is not."""
    name, _, rest = line.strip("\r\n").lstrip().partition(" ")
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        raise UsageError(f"unknown command {name!r:.60}" + (f"; did you mean {near}?" if near else ""))
    try:
        # the text of `edit` begins after one blank
        arguments = COMMANDS[name].read(rest if name == "edit" else rest.strip())
    except ValueError as error:
        raise UsageError(f"{name}: {error}; expected {COMMANDS[name].usage}") from None
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
        raise UsageError("\n".join(mistakes), hint=f"the commands are {', '.join(COMMANDS)}")
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


# -- the commands ------------------------------------------------------------------------------------------------------

_ROWS = (
    TreeCommand("left [N]", "the token before", _count("n", 1), "move", "moves"),
    TreeCommand("right [N]", "the next token of the branch", _count("n", 1), "move", "moves"),
    TreeCommand("up", "the branch above, of those that part at the cursor", _nothing, "move", "moves"),
    TreeCommand("down", "the branch below", _nothing, "move", "moves"),
    TreeCommand("start", "the beginning: the end of the prompt", _nothing, "move", "moves"),
    TreeCommand("end", "the end of the branch", _nothing, "move", "moves"),
    TreeCommand("goto NODE", "a node, by its number or its bookmark", _node, "move", "moves"),
    TreeCommand(
        "next [NATS]",
        "the next token chosen with at least this entropy (1)",
        _threshold,
        "move",
        "moves.next_uncertain",
    ),
    TreeCommand("previous [NATS]", "the one before", _threshold, "move", "moves.previous_uncertain"),
    TreeCommand(
        'take RANK|id:N|"TEXT" [N]', "this token, and N more (max_new_tokens; 0: no more)", _taken, "write", "writing"
    ),
    TreeCommand("generate [N]", "continue from the cursor by N tokens", _count("n", None), "write", "writing"),
    TreeCommand("sample [K] [N]", "K continuations from the cursor, each with its own seed", _both, "fork", "writing"),
    TreeCommand(
        "beams [K] [N]", "the K best continuations from the cursor that a beam search finds", _both, "fork", "writing"
    ),
    TreeCommand("edit TEXT", "another text from the cursor on", _text, "write", "writing"),
    TreeCommand("expand mass=SHARE,depth=N", "all continuations by joint probability", expansion, "fork", "expanding"),
    TreeCommand("undo", "take back the last step", _nothing, "back", "altering"),
    TreeCommand("redo", "do it again", _nothing, "back", "altering"),
    TreeCommand(
        "set KNOB=VALUE",
        "a setting of what follows; the distribution changes at once",
        _knobs,
        "set",
        "altering.set_knob",
    ),
    TreeCommand("preset NAME", "the settings of a preset", _name, "set", "altering"),
    TreeCommand("reset", "the settings that the tree began with", _nothing, "set", "altering"),
    TreeCommand(
        "bookmark [NAME]", "name the node at the cursor; without a name, one is made", _mark, "name", "altering"
    ),
    TreeCommand(
        "show [N]",
        "the N most probable tokens at the cursor, and what processors made of them",
        _count("n", 20),
        "look",
        "looking",
    ),
    TreeCommand("find TEXT", "the tokens at the cursor that have this text", _text, "look", "looking"),
    TreeCommand("why", "what each processor did to the token at the cursor", _nothing, "look", "looking"),
    TreeCommand("layers", "what the model would say after each of its layers", _nothing, "look", "looking"),
    TreeCommand("compare A [B]", "two branches side by side (B: the current one)", _two, "look", "looking"),
    TreeCommand("beside", "both distributions of --models or --beside, token by token", _nothing, "look", "looking"),
    TreeCommand("text", "the text of the branch", _nothing, "look", "looking"),
    TreeCommand("copy", "the same, for the clipboard", _nothing, "look", "looking.text"),
    TreeCommand("repeat", "the genctl command line that writes this branch again", _nothing, "look", "looking"),
)
COMMANDS = {row.name: row for row in _ROWS}

"""The commands of a tree, one row each: a single language for scripts, the screen's input line and its keys.

A line is a name and its arguments. All checks that need no checkpoint are made here, so a whole script is checked
before anything is loaded. Below are the results that commands yield (`events.to_json` serialises them).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, TypeAlias

from genctl.config import removed
from genctl.config.check import Wrong, check, did_you_mean, known
from genctl.config.presets import parse_value
from genctl.errors import UsageError, nearest
from genctl.events import Trace
from genctl.tree.token_tree import At, TokenNode

Arguments: TypeAlias = "dict[str, Any]"

# What a command does: it moves the cursor; writes a branch, which the cursor follows; writes several; undoes; changes
# settings; only looks.
Kind: TypeAlias = Literal["move", "write", "fork", "back", "set", "look"]


@dataclass(frozen=True)
class Call:
    """A parsed command with its arguments."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    line: str = ""  # as it was written


@dataclass(frozen=True)
class TreeCommand:
    """One command. Its function has the same name: moves map (tree, At, …) to an At, others take an Explorer."""

    usage: str  # its name and its arguments
    about: str
    read: Callable[[str], Arguments]
    kind: Kind

    @property
    def name(self) -> str:
        """The first word of a line."""
        return self.usage.partition(" ")[0]

    @property
    def function(self) -> Callable[..., Any]:
        """The function that implements it. For all commands but moves, this imports torch."""
        module = import_module(f"genctl.tree.{'token_tree' if self.kind == 'move' else 'writing'}")
        found: Callable[..., Any] = getattr(module, "set_knob" if self.name == "set" else self.name)
        return found


def parse(line: str) -> Call:
    """Parse a line. Raises UsageError; for a removed command, it names the replacement."""
    name, _, rest = line.strip("\r\n").lstrip().partition(" ")
    if name not in COMMANDS:
        if sentence := removed.sentence("explore", name):
            raise UsageError(sentence)
        near = nearest(name, COMMANDS)
        raise UsageError(f"unknown command {name!r:.60}" + (f"; did you mean {near}?" if near else ""))
    try:
        # the text of `edit` begins after one blank
        arguments = COMMANDS[name].read(rest if name == "edit" else rest.strip())
    except ValueError as error:
        raise UsageError(f"{name}: {error}; expected {COMMANDS[name].usage}") from None
    return Call(name, arguments, line.strip("\r\n"))


def parse_script(lines: Iterable[str], name: str) -> list[Call]:
    """Parse a script of one command per line; empty lines and those that begin with # are skipped.

    Raises UsageError that lists all invalid lines with their numbers.
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


def _number(name: str, default: int | None) -> Callable[[str], Arguments]:
    return lambda rest: {name: _whole(rest, 1, name) if rest else default}


def _two_numbers(rest: str) -> Arguments:
    words = rest.split()
    if len(words) > 2:
        raise ValueError(f"two numbers at most, not {rest!r:.60}")
    return {"k": _whole(words[0], 1, "K") if words else 4, "n": _whole(words[1], 1, "N") if len(words) > 1 else None}


def _quoted(rest: str) -> tuple[str, str]:
    """Parse a quoted text with JSON escapes; return it, and the rest of the line."""
    try:
        text, end = json.JSONDecoder().raw_decode(rest)
    except ValueError:
        raise ValueError(f"{rest!r:.60} has no closing quote, or an escape that JSON lacks") from None
    return text, rest[end:].strip()


def _taken(rest: str) -> Arguments:
    """A token (a rank, id:N, or a quoted text), and how many tokens follow it."""
    token: int | str
    if rest.startswith('"'):
        token, more = _quoted(rest)
    else:
        first, _, more = rest.partition(" ")
        number = first.removeprefix("id:")
        token = first if number != first and _whole(number, 0, "an id") >= 0 else _whole(first, 1, "a rank")
    return {"token": token, "n": _whole(more.strip(), 0, "n") if more else None}


def _text(rest: str) -> Arguments:
    """A text: in quotes with JSON escapes, or verbatim."""
    text, more = _quoted(rest) if rest.startswith('"') else (rest, "")
    if more:
        raise ValueError(f"{more!r:.60} follows the text in quotes")
    if not text:
        raise ValueError("there is no text")
    return {"text": text}


def _knob(rest: str) -> Arguments:
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
    """Parse `mass=0.9,depth=6,nodes=1000`, of which only depth is required. Raises ValueError."""
    found: Arguments = {}
    for part in text.replace(",", " ").split():
        key, equals, value = part.partition("=")
        if key in found or key not in ("mass", "depth", "nodes") or not equals:
            raise ValueError(f"{part!r:.60} is not one of mass=SHARE, depth=N, nodes=N, each once")
        found[key] = value if key == "mass" else _whole(value, 1, key)
    if "depth" not in found:
        raise ValueError("there is no depth=N, and a text may have no end")
    if not 0.0 < (mass := float(found.get("mass", 1.0))) <= 1.0:
        raise ValueError(f"mass is above 0 and at most 1, not {found['mass']!r:.60}")
    return {**found, "mass": mass}


# -- the commands ------------------------------------------------------------------------------------------------------

_ROWS = (
    TreeCommand("left [N]", "the token before", _number("n", 1), "move"),
    TreeCommand("right [N]", "the next token of the branch", _number("n", 1), "move"),
    TreeCommand("up", "the branch above, of those that part at the cursor", _nothing, "move"),
    TreeCommand("down", "the branch below", _nothing, "move"),
    TreeCommand("start", "the beginning: the end of the prompt", _nothing, "move"),
    TreeCommand("end", "the end of the branch", _nothing, "move"),
    TreeCommand("goto NODE", "a node, by its number", lambda rest: {"node": _whole(rest, 0, "a node")}, "move"),
    TreeCommand('take RANK|id:N|"TEXT" [N]', "this token, and N more (max_new_tokens; 0: no more)", _taken, "write"),
    TreeCommand("generate [N]", "continue from the cursor by N tokens", _number("n", None), "write"),
    TreeCommand("sample [K] [N]", "K continuations from the cursor, each with its own seed", _two_numbers, "fork"),
    TreeCommand("beams [K] [N]", "the K best continuations that a beam search finds", _two_numbers, "fork"),
    TreeCommand("edit TEXT", "another text from the cursor on", _text, "write"),
    TreeCommand("expand mass=SHARE,depth=N", "all continuations by joint probability", expansion, "fork"),
    TreeCommand("undo", "take back the last step", _nothing, "back"),
    TreeCommand("set KNOB=VALUE", "a setting of what follows; the distribution changes at once", _knob, "set"),
    TreeCommand("preset NAME", "the settings of a preset", _name, "set"),
    TreeCommand("show [N]", "the N most probable tokens, and what processors made of them", _number("n", 20), "look"),
    TreeCommand("find TEXT", "the tokens at the cursor that have this text", _text, "look"),
    TreeCommand("why", "what each processor did to the token at the cursor", _nothing, "look"),
    TreeCommand("text", "the text of the branch", _nothing, "look"),
    TreeCommand("save FILE", "save the tree in a new file, which gets what follows, too", _name, "look"),
)
COMMANDS = {row.name: row for row in _ROWS}


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alternative:
    """One token that may follow a node."""

    id: int
    text: str  # of the token alone
    rank: int  # by the model, from 1
    logprob: float  # the model's, in nats
    processed: float  # after the processors; -inf: removed
    removed_by: str = ""  # the processor that removed it
    node: int | None = None  # its node, if the tree has it

    @property
    def probability(self) -> float:
        """The model's own probability."""
        return math.exp(self.logprob)

    @property
    def chance(self) -> float:
        """The probability after the processors, with which sampling takes the token."""
        return math.exp(self.processed)


@dataclass(frozen=True, slots=True)
class TokenWritten:
    """A token was written to the end of a branch."""

    token: TokenNode
    known: bool = False  # the tree had it before


@dataclass(frozen=True, slots=True)
class Wrote:
    """A continuation is done."""

    node: int  # its end
    start: int
    reason: str  # eos, length, stop, time, interrupted
    text: str
    logprob: float  # of its tokens, the model's own
    seed: int | None = None
    score: float | None = None  # of a search


@dataclass(frozen=True, slots=True)
class Settings:
    """The current settings, on top of those that the tree began with."""

    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """The distribution of the next token."""

    node: int
    entropy: float
    mass: float  # of the listed alternatives, by the model
    alternatives: tuple[Alternative, ...]
    effects: tuple[Trace, ...] = ()  # of each processor, traced for the most probable token
    after_eos: bool = False  # the text has already ended


@dataclass(frozen=True, slots=True)
class Why:
    """What each processor did to a token."""

    token: Alternative
    trace: tuple[Trace, ...]
    after_eos: bool = False


@dataclass(frozen=True, slots=True)
class BranchText:
    """The text of a branch."""

    node: int
    text: str
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Saved:
    """The tree was saved to another file, which receives all later changes."""

    path: str


@dataclass(frozen=True, slots=True)
class Continuation:
    """One continuation of an expansion, which lists them by joint probability."""

    node: int
    token_ids: tuple[int, ...]
    text: str
    logprob: float  # the model's own, in nats
    total: float  # by the distribution that was expanded: after the processors
    mass: float  # probability of this and all continuations before it
    ended: bool = False  # with EOS; else it reached the depth, or is dead
    dead: bool = False  # the processors leave no token after it: `total` is -inf


@dataclass(frozen=True, slots=True)
class Covered:
    """An expansion is done."""

    mass: float
    continuations: int
    nodes: int  # whose distributions were computed
    complete: bool  # the mass is reached, or nothing is left
    reason: str = ""  # why it is not complete
    dead_ends: int = 0  # texts after which the processors leave no token


Result: TypeAlias = TokenWritten | Wrote | At | Settings | Shown | Why | BranchText | Saved | Continuation | Covered

"""The commands of a chat: a line that begins with / and a name.

`read` distinguishes commands from text to send. A path such as /etc/hosts is text, and so is a line that begins with
//, which is sent with one /.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from genctl.errors import UsageError, nearest

Takes = Literal["nothing", "maybe", "something"]


@dataclass(frozen=True)
class SlashCommand:
    """One command: its name without /, its argument, and a one-line description."""

    name: str
    about: str
    argument: str = ""
    takes: Takes = "nothing"
    aliases: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        """The command as it is typed: `/edit [N]`, `/quit, /exit`."""
        shown = f"[{self.argument}]" if self.takes == "maybe" else self.argument
        return f"{', '.join(f'/{name}' for name in (self.name, *self.aliases))} {shown}".rstrip()


COMMANDS: tuple[SlashCommand, ...] = (
    SlashCommand("retry", "answer the last turn again; the first answer stays on its branch"),
    SlashCommand("undo", "go back to where the chat was before the last turn, retry, edit or branch"),
    SlashCommand(
        "edit",
        "change turn N (default: the last one), or put TEXT in its place, and answer it again",
        "N [TEXT]",
        "maybe",
    ),
    SlashCommand("branch", "list the branches, or go to branch N", "N", "maybe"),
    SlashCommand("prompt", "show the prompt of the last turn as the model reads it: token ids and text"),
    SlashCommand("scores", "show or hide each token's probability under an answer"),
    SlashCommand(
        "set",
        "change a setting, such as temperature=0.7; KEY alone shows it; without one, list what is set",
        "KEY=VALUE",
        "maybe",
    ),
    SlashCommand("unset", "reset a setting that /set has changed", "KEY", "something"),
    SlashCommand("preset", "use a preset on top of the settings", "NAME", "something"),
    SlashCommand("system", "set the system message; without a text, take it away", "TEXT", "maybe"),
    SlashCommand("save", "show where the chat is saved, or continue in FILE", "FILE", "maybe"),
    SlashCommand("new", "begin a new conversation with the same settings; this one stays saved", aliases=("clear",)),
    SlashCommand("help", "list the commands and keys"),
    SlashCommand("quit", "leave, as Ctrl-D does", aliases=("exit", "q", "bye")),
)
NAMES = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
_NAME = re.compile(r"/([A-Za-z-]*)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Typed:
    """A parsed line: text to send, or a command with its argument."""

    text: str = ""
    command: SlashCommand | None = None


def read(line: str) -> Typed:
    """The command or the text of a line. Raises UsageError for a command that does not exist or lacks its argument."""
    if line.startswith("//"):
        return Typed(line[1:])
    match = _NAME.fullmatch(line.rstrip())
    if match is None:
        return Typed(line)
    name, argument = match[1].lower(), (match[2] or "").strip()
    command = NAMES.get(name)
    if command is None:
        near = nearest(name, NAMES)
        advice = f"; did you mean /{near}?" if near else ""
        raise UsageError(f"there is no command /{name}{advice}", hint="/help lists them; // begins a text with /")
    if argument and command.takes == "nothing":
        raise UsageError(f"/{name} takes nothing, but {argument!r:.60} follows it")
    if not argument and command.takes == "something":
        raise UsageError(f"/{name} needs {command.argument}")
    return Typed(argument, command)


def number(typed: Typed, what: str) -> int | None:
    """The number that follows a command, from 1; None if there is none. Raises UsageError."""
    if not typed.text:
        return None
    if not typed.text.isdecimal() or int(typed.text) < 1:
        assert typed.command is not None
        raise UsageError(f"{typed.command.usage}: expected the number of a {what}, got {typed.text!r:.60}")
    return int(typed.text)


def completions(before: str, knobs: Iterable[str], presets: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Completions of a line: words, and how many characters of `before` each one replaces.

    `knobs` and `presets` are the names that /set, /unset and /preset take.
    """
    if not before.startswith("/") or "\n" in before:
        return
    name, space, rest = before[1:].partition(" ")
    if not space:
        yield from ((f"/{each}", len(before)) for each in NAMES if each.startswith(name) and each != name)
        return
    choices = {"set": [f"{knob}=" for knob in knobs], "unset": knobs, "preset": presets}.get(name, ())
    word = rest.lstrip()
    yield from ((choice, len(word)) for choice in choices if choice.startswith(word))

"""The commands of a chat that are not answered: branches, earlier turns, settings, files. `DO` lists them."""

from __future__ import annotations

import base64
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from genctl.commands.chat import slash, thinking
from genctl.commands.chat.chat import Chat, new_notices, setting
from genctl.commands.chat.line_input import SIGN
from genctl.commands.chat.log import ChatLog, Entry, Message
from genctl.commands.chat.saved import remember
from genctl.config.check import shown
from genctl.errors import UsageError, count
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import unbroken

KEYS = (
    ("Enter", "say it"),
    ("Alt-Enter, or \\ and Enter", "a new line"),
    ("Tab", "complete a command, a setting, a file"),
    ("Up, Down, Ctrl-R", "what was typed before, in all chats"),
    ("Ctrl-C", "end the answer, and keep what it has. Twice: leave"),
    ("Ctrl-D", "leave"),
)
MOST_COPIED = 74_000  # bytes that terminals take for their clipboard at once


class Leave(Exception):
    """The person leaves."""


@dataclass
class ChatScreen:
    """A chat and the terminal on which it is shown."""

    chat: Chat
    out: Console
    scores: bool  # whether token probabilities are shown under each answer

    def note(self, words: str, *whole: str) -> None:
        """Print a remark of the program, dimmed. No line is broken inside of a word, nor of the texts in `whole`."""
        parts = [widgets.visible(each) for each in whole]
        for line in unbroken(widgets.visible(words), max(self.out.width, 20), parts):
            self.out.print(Text(line, style=theme.DIM), soft_wrap=True)

    def show_end(self) -> None:
        """The last turn of the branch and its answer, as they were printed."""
        log = self.chat.log
        if (turns := log.turns_to(log.end)) > 1:
            self.note(f"({count(turns - 1, 'turn')} before)")
        for message in log.here[-2:]:
            text = thinking.split(message.content)[1] if message.role == "assistant" else message.content
            sign = SIGN if message.role == "user" else ""
            self.out.print(Text(f"{sign}{widgets.visible(text)}"), soft_wrap=False)


# -- branches ------------------------------------------------------------------------------------------------------


def _undone(screen: ChatScreen, words: str, entries: Sequence[Entry]) -> None:
    screen.chat.refresh()
    log = screen.chat.log
    screen.note(f"{words}: {in_words(log, entries[0])}; the chat has {count(log.turns_to(log.end), 'turn')}")


def _branch(screen: ChatScreen, typed: slash.Typed) -> None:
    number, log = slash.number(typed, "branch"), screen.chat.log
    if number is not None:
        log.change("go", log.branch(number).id)
        screen.show_end()
        return
    if not log.branches:
        screen.note("the chat is empty")
    here = {message.id for message in log.here}
    for place, leaf in enumerate(log.branches, 1):
        start = f"{'*' if leaf.id in here else ' '} {place}  {count(leaf.turns, 'turn'):<9} "
        screen.out.print(Text(start + widgets.first_words(leaf.content, max(screen.out.width - len(start), 8))))


def _tree(screen: ChatScreen, typed: slash.Typed) -> None:
    for before, words, here in drawn(screen.chat.log, screen.out.width):
        line = Text(before, style=theme.DIM).append(widgets.visible(words), theme.PLAIN if here else theme.DIM)
        screen.out.print(widgets.fit(line, screen.out.width))


# -- messages ------------------------------------------------------------------------------------------------------


def _think(screen: ChatScreen, typed: slash.Typed) -> None:
    last = _last(screen.chat)
    thought = screen.chat.thoughts.get(last.id) or thinking.split(last.content)[0]
    if not thought:
        raise UsageError("the last answer has no thought before it")
    screen.out.print(Text(widgets.visible(thought), style=theme.DIM), soft_wrap=False)


def _prompt(screen: ChatScreen, typed: slash.Typed) -> None:
    turn = screen.chat.plan_again()
    screen.note(f"{count(len(turn.ids), 'token')}:")
    screen.out.print(Text(" ".join(map(str, turn.ids))), soft_wrap=False)
    screen.out.print(Text(widgets.visible(turn.opening), style=theme.DIM), soft_wrap=False)


def _tokens(screen: ChatScreen, typed: slash.Typed) -> None:
    log, context, used = screen.chat.log, screen.chat.partner.context, 0
    if log.turns_to(log.end):
        last = log.last_answer
        used = len(screen.chat.plan_again().ids) + (0 if last is None else len(last.token_ids))
    words = f"{used} tokens of the context are used"
    if screen.chat.partner.kind == "alone":
        words = "each turn is read on its own, so no context fills up"
    elif context is None:
        words += "; the model has no limit"
    else:
        words += f", {max(context - used, 0)} of {context} are left"
    if log.left_out:
        words += f"; the first {count(log.left_out, 'message is', 'messages are')} left out of the prompt"
    screen.note(words)


def _copy(screen: ChatScreen, typed: slash.Typed) -> None:
    answer = thinking.split(_last(screen.chat).content)[1]
    data = answer.encode("utf-8", "replace")
    if not screen.out.is_interactive:
        raise UsageError("/copy: this terminal takes no text for the clipboard")
    if len(data) > MOST_COPIED:
        raise UsageError(f"/copy: the answer has {len(data)} bytes, and terminals take {MOST_COPIED} at once")
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\a")
    sys.stdout.flush()
    screen.note(f"{count(len(answer), 'character')} sent to the clipboard (by OSC 52, if the terminal takes it)")


def _last(chat: Chat) -> Message:
    answer = chat.log.last_answer
    if answer is None:
        raise UsageError("nothing has been answered yet")
    return answer


# -- settings and files --------------------------------------------------------------------------------------------


def _change(screen: ChatScreen, typed: slash.Typed) -> None:
    """A setting: /set, /unset, /preset or /system."""
    assert typed.command is not None
    chat, name, argument = screen.chat, typed.command.name, typed.text
    if name == "set" and not argument:
        values = chat.own_values
        screen.note("; ".join(f"{key} = {shown(value)}" for key, value in values.items()) or "nothing is set here")
        return
    key = argument.replace("-", "_")
    if name == "set" and key in chat.base.origins:
        value = {**vars(chat.base.generation), **vars(chat.base.runtime)}.get(key)
        held = "is not set" if value is None else f"= {shown(value)}"
        screen.note(f"{key} {held} ({chat.base.origins[key]}); /set {key}=VALUE sets it")
        return
    before = chat.base
    chat.change(name, argument)
    for line in new_notices(before, chat.base):
        screen.note(line)
    if name == "system":
        screen.note("the system message is set" if argument else "there is no system message")
    else:
        screen.note(f"set {setting(argument)}" if name == "set" else f"{name} {argument}")


def _scores(screen: ChatScreen, typed: slash.Typed) -> None:
    if not screen.scores:
        screen.chat.base_plan.require_logprobs("/scores")
    screen.scores = not screen.scores
    screen.note(f"token probabilities are {'shown under each answer' if screen.scores else 'no longer shown'}")


def _save(screen: ChatScreen, typed: slash.Typed) -> None:
    if typed.text:
        new = Path(typed.text).expanduser()
        screen.chat.log.save(new)
        remember(new)
    if (path := screen.chat.log.path) is None:
        screen.note("the chat is empty, so nothing is saved")
    else:
        quoted = shlex.quote(str(path))
        screen.note(f"saved in {quoted}", quoted)


def _help(screen: ChatScreen, typed: slash.Typed) -> None:
    width = max(len(command.usage) for command in slash.COMMANDS)
    rows = [(command.usage, command.about) for command in slash.COMMANDS]
    for first, about in (*rows, *KEYS):
        text = Text(about).wrap(screen.out, max(screen.out.width - width - 4, 20))
        for place, line in enumerate(text):
            line.rstrip()
            screen.out.print(Text(f"  {first if not place else '':<{width}}  ").append_text(line))


def _leave(screen: ChatScreen, typed: slash.Typed) -> None:
    raise Leave


DO: dict[str, Callable[[ChatScreen, slash.Typed], None]] = {
    "undo": lambda screen, typed: _undone(screen, "undone", screen.chat.log.undo()),
    "redo": lambda screen, typed: _undone(screen, "done again", screen.chat.log.redo()),
    "branch": _branch,
    "tree": _tree,
    "think": _think,
    "prompt": _prompt,
    "tokens": _tokens,
    "copy": _copy,
    **dict.fromkeys(("set", "unset", "preset", "system"), _change),
    "scores": _scores,
    "save": _save,
    "help": _help,
    "quit": _leave,
}


def in_words(log: ChatLog, entry: Entry) -> str:
    """What was undone or done again, by its first entry."""
    if isinstance(entry, Message):
        if entry.role == "assistant":
            return "another answer"
        words = widgets.first_words(entry.content, 40)
        edited = any(each.parent == entry.parent and each.id < entry.id for each in log.messages.values())
        return f"turn {log.turns_to(entry.parent) + 1}, {words}" if edited else f"the turn {words}"
    if entry.name == "leave_out":
        return f"leaving out {count(entry.value, 'message')}"
    if entry.name == "go":
        places = {leaf.id: place for place, leaf in enumerate(log.branches, 1)}
        return f"going to branch {places.get(entry.value, '')}"
    return f"/{widgets.first_words(f'{entry.name} {entry.value}', 40)}"


def drawn(log: ChatLog, width: int) -> Iterator[tuple[str, str, bool]]:
    """All branches in lines: what stands before a message, the message, and whether the chat continues its branch.

    Messages that follow one another stand below one another; a fork indents what follows it.
    """
    here = {message.id for message in log.here}
    leaves = {message.id: place for place, message in enumerate(log.branches, 1)}
    children: dict[int | None, list[Message]] = {}
    for message in log.messages.values():
        children.setdefault(message.parent, []).append(message)
    waiting: list[tuple[Message, str, str]] = []  # message, before its line, before the lines that follow it

    def follow(id: int | None, indent: str) -> None:
        below = children.get(id, [])
        if len(below) == 1:
            waiting.append((below[0], indent, indent))
            return
        for child in reversed(below):
            last = child is below[-1]
            # forks within forks are indented while a line has room for words
            deeper = indent + ("  " if last else "│ ") if 2 * len(indent) < width else indent
            waiting.append((child, indent + ("└ " if last else "├ "), deeper))

    follow(None, "")
    while waiting:
        message, before, after = waiting.pop()
        sign = {"user": "›", "assistant": "·"}.get(message.role, "#")
        leaf = f" [{leaves[message.id]}]" if message.id in leaves else ""
        words = " ".join(message.content.split())
        room = max(width - len(before) - len(leaf) - 2, 8)
        cut = words if len(words) <= room else f"{words[: room - 1]}…"
        yield before, f"{sign} {cut}{leaf}", message.id in here
        follow(message.id, after)

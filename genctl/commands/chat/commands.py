"""What a line does that a person types: a turn, or a command. `run` is the loop, and `DO` lists the commands."""

from __future__ import annotations

import base64
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from genctl.commands.chat import saved, slash, thinking
from genctl.commands.chat.chat import new_notices, setting
from genctl.commands.chat.line_input import SIGN, LineCleared
from genctl.commands.chat.log import ChatLog, Entry, Message
from genctl.commands.chat.screen import ChatScreen
from genctl.config.check import shown
from genctl.errors import Exit, GenctlError, UsageError, count
from genctl.terminal import theme, widgets
from genctl.terminal.message import print_message

KEYS = (
    ("Enter", "send the line"),
    ("Alt-Enter, or \\ and Enter", "a new line"),
    ("Tab", "complete a command, a setting, a file"),
    ("Up, Down, Ctrl-R", "earlier input, from all chats"),
    ("Ctrl-C", "stop the answer, and keep the text so far; clear the line. Twice on an empty line: leave"),
    ("Ctrl-D", "leave"),
)
MOST_COPIED = 74_000  # bytes that terminals take for their clipboard at once


def run(screen: ChatScreen, initial_turns: Iterable[str]) -> int:
    """Talk until the person leaves. Returns the exit status."""
    status, leaves = int(Exit.DONE), False  # leaves: the next Ctrl-C on an empty line does
    if not screen.options.quiet:
        screen.note(f"{screen.chat.partner.name}: /help lists the commands, Ctrl-D leaves")
    try:
        _guarded(screen, screen.resume)
        for text in initial_turns:
            screen.out.print(Text(f"{SIGN}{widgets.visible(text)}"))
            _guarded(screen, _say, screen, text)
        while True:
            draft, screen.draft = screen.draft, ""
            try:
                line = screen.lines.read(draft)
            except LineCleared:
                leaves = False
                continue
            except KeyboardInterrupt:
                if leaves:
                    raise
                leaves = True
                screen.note("Ctrl-C again leaves, and so does Ctrl-D")
                continue
            leaves = False
            if line.strip():
                _guarded(screen, _do, screen, line)
    except (EOFError, Leave):
        pass
    except KeyboardInterrupt:
        status = int(Exit.INTERRUPTED)
    if command := screen.reopening:
        screen.note(f"saved; {command} continues it", command)
    return status


def _guarded(screen: ChatScreen, do: Callable[..., object], *arguments: Any) -> None:
    """Do it; an error is printed."""
    try:
        do(*arguments)
    except GenctlError as error:
        for part in error.message.split("\n"):
            print_message(f"error: {part}", color=screen.options.color)
        screen.advise(error.hint)


def _do(screen: ChatScreen, line: str) -> None:
    """Do the command of a line, or say its text."""
    typed = slash.read(line)
    if typed.command is None:
        _say(screen, typed.text)
        return
    name = typed.command.name
    if typed.command.local and screen.chat.partner.session is None:
        raise UsageError(f"/{name} needs the token ids of a checkpoint, which servers do not report")
    DO[name](screen, typed)


def _say(screen: ChatScreen, text: str) -> None:
    if screen.options.prompt_template is not None:
        text = screen.options.prompt_template.fill({"prompt": text})
    screen.say(text, screen.chat.log.end)


class Leave(Exception):
    """The person leaves."""


# -- turns ---------------------------------------------------------------------------------------------------------


def _retry(screen: ChatScreen, typed: slash.Typed) -> None:
    log = screen.chat.log
    question = log.turn()
    before = {message.content for message in log.answers(question.id)}
    turn = screen.fitting(screen.chat.plan_again, question.parent)
    screen.answer(turn)
    answer = log.last_answer
    if turn and not turn.request.resolved.generation.draws and answer is not None and answer.content in before:
        screen.note("the same answer: nothing is drawn (do_sample = false); /set temperature=0.8 draws")


def _edit(screen: ChatScreen, typed: slash.Typed) -> None:
    log = screen.chat.log
    first, _, text = typed.text.partition(" ")
    number = slash.number(slash.Typed(first, typed.command), "turn") or log.turns_to(log.end)
    question = log.turn(number)
    if not text.strip():
        screen.note(f"change turn {number}: Enter answers it again, Ctrl-C leaves it as it is")
        try:
            text = screen.lines.read(question.content)
        except (EOFError, KeyboardInterrupt):
            screen.note("nothing was changed")
            return
    screen.say(text, question.parent)


# -- branches ------------------------------------------------------------------------------------------------------


def _undo(screen: ChatScreen, typed: slash.Typed) -> None:
    """/undo or /redo."""
    assert typed.command is not None
    log, is_undo = screen.chat.log, typed.command.name == "undo"
    entries = log.undo() if is_undo else log.redo()
    screen.chat.refresh()
    words, turns = in_words(log, entries[0]), count(log.turns_to(log.end), "turn")
    screen.note(f"{'undone' if is_undo else 'done again'}: {words}; the chat has {turns}")


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
    last = _last(screen)
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
    answer = thinking.split(_last(screen).content)[1]
    data = answer.encode("utf-8", "replace")
    if not screen.out.is_interactive:
        raise UsageError("/copy: this terminal takes no text for the clipboard")
    if len(data) > MOST_COPIED:
        raise UsageError(f"/copy: the answer has {len(data)} bytes, and terminals take {MOST_COPIED} at once")
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\a")
    sys.stdout.flush()
    screen.note(f"{count(len(answer), 'character')} sent to the clipboard (by OSC 52, if the terminal takes it)")


def _last(screen: ChatScreen) -> Message:
    answer = screen.chat.log.last_answer
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
        saved.remember(new)
    if (path := screen.chat.log.path) is None:
        screen.note("the chat is empty, so nothing is saved")
    else:
        quoted = shlex.quote(str(path))
        screen.note(f"saved in {quoted}", quoted)


def _load(screen: ChatScreen, typed: slash.Typed) -> None:
    path, here = saved.path_of(typed.text), screen.chat.log.path
    with suppress(OSError):
        if here is not None and path.samefile(here):
            screen.note("this chat is open already")
            return
    screen.chat = screen.open_chat(path)
    screen.when_full = ""
    screen.resume()


def _new(screen: ChatScreen, typed: slash.Typed) -> None:
    if not screen.chat.log.messages:
        raise UsageError("the chat is empty")
    command = screen.reopening
    screen.chat.begin_anew()
    screen.when_full = ""
    screen.note("a new conversation" + (f"; {command} continues the one before" if command else ""), command)


def _help(screen: ChatScreen, typed: slash.Typed) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for first, about in (*((command.usage, command.about) for command in slash.COMMANDS), *KEYS):
        table.add_row(Text(f"  {first}"), Text(about))
    screen.out.print(table)


def _leave(screen: ChatScreen, typed: slash.Typed) -> None:
    raise Leave


DO: dict[str, Callable[[ChatScreen, slash.Typed], None]] = {
    "retry": _retry,
    "edit": _edit,
    **dict.fromkeys(("undo", "redo"), _undo),
    "branch": _branch,
    "tree": _tree,
    "think": _think,
    "prompt": _prompt,
    "tokens": _tokens,
    "copy": _copy,
    **dict.fromkeys(("set", "unset", "preset", "system"), _change),
    "scores": _scores,
    "save": _save,
    "load": _load,
    "new": _new,
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

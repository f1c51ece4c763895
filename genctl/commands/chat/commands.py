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
from genctl.commands.chat.log import ChatLog, Message
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
    except EOFError:
        pass
    except KeyboardInterrupt:
        status = int(Exit.INTERRUPTED)
    if screen.reopening:
        screen.note(f"saved; {screen.reopening} continues it")
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
    screen.answer(screen.chat.plan(text, screen.chat.log.end))


# -- turns and branches ------------------------------------------------------------------------------------------------


def _retry(screen: ChatScreen, typed: slash.Typed) -> None:
    log = screen.chat.log
    before = {message.content for message in log.answers(log.turn().id)}
    turn = screen.chat.plan_again()
    screen.answer(turn)
    answer = log.last_answer
    if not turn.request.resolved.generation.draws and answer is not None and answer.content in before:
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
    screen.answer(screen.chat.plan(text, question.parent))


def _undo(screen: ChatScreen, typed: slash.Typed) -> None:
    log = screen.chat.log
    log.undo()
    screen.note(f"undone: the chat has {count(log.turns_to(log.end), 'turn')}")


def _redo(screen: ChatScreen, typed: slash.Typed) -> None:
    log = screen.chat.log
    log.redo()
    screen.note(f"done again: the chat has {count(log.turns_to(log.end), 'turn')}")


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
        sign, turns = "*" if leaf.id in here else " ", count(log.turns_to(leaf.id), "turn")
        words = widgets.first_words(leaf.content, max(screen.out.width - 16, 8))
        screen.out.print(Text(f"{sign} {place}  {turns:<9} {words}"))


def _tree(screen: ChatScreen, typed: slash.Typed) -> None:
    for line, here in drawn(screen.chat.log, screen.out.width):
        screen.out.print(widgets.fit(Text(line, theme.PLAIN if here else theme.DIM), screen.out.width))


def drawn(log: ChatLog, width: int) -> Iterator[tuple[str, bool]]:
    """All messages, one a line, and whether the chat continues their branch.

    Messages that follow one another stand below one another; a fork indents what follows it. The last message of a
    branch ends with its number.
    """
    here = {message.id for message in log.here}
    leaves = {message.id: f" [{place}]" for place, message in enumerate(log.branches, 1)}
    children: dict[int | None, list[Message]] = {}
    for message in log.answered:
        children.setdefault(message.parent, []).append(message)
    first = children.get(None, [])
    waiting = [(message, int(len(first) > 1)) for message in reversed(first)]
    while waiting:
        message, depth = waiting.pop()
        start = "  " * min(depth, width // 8) + {"user": "›", "assistant": "·"}.get(message.role, "#")
        leaf = leaves.get(message.id, "")
        words = widgets.first_words(message.content, max(width - len(start) - len(leaf) - 1, 8))
        yield f"{start} {words}{leaf}", message.id in here
        below = children.get(message.id, [])
        waiting += [(child, depth + (len(below) > 1)) for child in reversed(below)]


# -- messages ----------------------------------------------------------------------------------------------------------


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
        used = len(screen.chat.plan_again().ids) + (0 if log.last_answer is None else len(log.last_answer.token_ids))
    if screen.chat.partner.kind == "alone":
        screen.note("each turn is read on its own, so no context fills up")
    elif context is None:
        screen.note(f"{used} tokens of the context are used; the model has no limit")
    else:
        screen.note(f"{used} tokens of the context are used, {max(context - used, 0)} of {context} are left")


def _copy(screen: ChatScreen, typed: slash.Typed) -> None:
    if not screen.out.is_interactive:
        raise UsageError("/copy: this terminal takes no text for the clipboard")
    answer = thinking.split(_last(screen).content)[1]
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(answer.encode('utf-8', 'replace')).decode()}\a")
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
        screen.note(
            "; ".join(f"{key} = {shown(value)}" for key, value in chat.own_values.items()) or "nothing is set here"
        )
        return
    key, before = argument.replace("-", "_"), chat.base
    if name == "set" and key in before.origins:
        value = {**vars(before.generation), **vars(before.runtime)}.get(key)
        held = "is not set" if value is None else f"= {shown(value)}"
        screen.note(f"{key} {held} ({before.origins[key]}); /set {key}=VALUE sets it")
        return
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
    log = screen.chat.log
    if typed.text:
        log.save(Path(typed.text).expanduser())
    screen.note(
        "the chat is empty, so nothing is saved" if log.path is None else f"saved in {shlex.quote(str(log.path))}"
    )


def _load(screen: ChatScreen, typed: slash.Typed) -> None:
    path, here = saved.path_of(typed.text), screen.chat.log.path
    with suppress(OSError):
        if here is not None and path.samefile(here):
            screen.note("this chat is open already")
            return
    screen.load(path)
    screen.resume()


def _new(screen: ChatScreen, typed: slash.Typed) -> None:
    if not screen.chat.log.messages:
        raise UsageError("the chat is empty")
    command = screen.reopening
    screen.chat.begin_anew()
    screen.note("a new conversation" + (f"; {command} continues the one before" if command else ""))


def _help(screen: ChatScreen, typed: slash.Typed) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for first, about in (*((command.usage, command.about) for command in slash.COMMANDS), *KEYS):
        table.add_row(Text(f"  {first}"), Text(about))
    screen.out.print(table)


def _quit(screen: ChatScreen, typed: slash.Typed) -> None:
    raise EOFError  # as Ctrl-D does


DO: dict[str, Callable[[ChatScreen, slash.Typed], None]] = {
    "retry": _retry,
    "edit": _edit,
    "undo": _undo,
    "redo": _redo,
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
    "quit": _quit,
}

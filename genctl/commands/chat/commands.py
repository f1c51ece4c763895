"""What a line does that a person types: a turn, or a command. `run` is the loop, and `_do` has the commands."""

from __future__ import annotations

import base64
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from genctl.commands.chat import slash, thinking
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
            try:
                line = screen.lines.read()
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
        screen.note(f"saved; {screen.reopening} continues it", screen.reopening)
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
    typed, chat, log, out = slash.read(line), screen.chat, screen.chat.log, screen.out
    if typed.command is None:
        _say(screen, typed.text)
        return
    if typed.command.local and chat.partner.session is None:
        raise UsageError(f"/{typed.command.name} needs the token ids of a checkpoint, which servers do not report")
    match typed.command.name:
        case "retry":
            _retry(screen)
        case "edit":
            _edit(screen, typed)
        case "undo" | "redo" as name:
            log.undo(again=name == "redo")
            done = "undone" if name == "undo" else "done again"
            screen.note(f"{done}: the chat has {count(log.turns_to(log.end), 'turn')}")
        case "branch":
            _branch(screen, slash.number(typed, "branch"))
        case "tree":
            for branch, here in drawn(log, out.width):
                out.print(widgets.fit(Text(branch, theme.PLAIN if here else theme.DIM), out.width))
        case "think":
            thought = chat.thoughts.get(_last(log).id) or thinking.split(_last(log).content)[0]
            if not thought:
                raise UsageError("the last answer has no thought before it")
            out.print(Text(widgets.visible(thought), style=theme.DIM), soft_wrap=False)
        case "prompt":
            turn = chat.plan_again()
            screen.note(f"{count(len(turn.ids), 'token')}:")
            out.print(Text(" ".join(map(str, turn.ids))), soft_wrap=False)
            out.print(Text(widgets.visible(turn.opening), style=theme.DIM), soft_wrap=False)
        case "tokens":
            _tokens(screen)
        case "copy":
            if not out.is_interactive:
                raise UsageError("/copy: this terminal takes no text for the clipboard")
            answer = thinking.split(_last(log).content)[1]
            sys.stdout.write(f"\x1b]52;c;{base64.b64encode(answer.encode('utf-8', 'replace')).decode()}\a")
            sys.stdout.flush()
            characters = count(len(answer), "character")
            screen.note(f"{characters} sent to the clipboard (by OSC 52, if the terminal takes it)")
        case "set" | "unset" | "preset" | "system" as name:
            _change(screen, name, typed.text)
        case "scores":
            if not screen.scores:
                chat.base_plan.require_logprobs("/scores")
            screen.scores = not screen.scores
            screen.note(f"token probabilities are {'shown under each answer' if screen.scores else 'no longer shown'}")
        case "save":
            if typed.text:
                log.save(Path(typed.text).expanduser())
            path = "" if log.path is None else shlex.quote(str(log.path))
            screen.note(f"saved in {path}" if path else "the chat is empty, so nothing is saved", path)
        case "load":
            file = Path(typed.text).expanduser()
            if log.path is not None and file.exists() and file.samefile(log.path):
                raise UsageError(f"/load {typed.text}: this is the chat that is open")
            screen.load(file)
            screen.resume()
        case "new":
            if not log.messages:
                raise UsageError("the chat is empty")
            command = screen.reopening
            chat.begin_anew()
            screen.note("a new conversation" + (f"; {command} continues the one before" if command else ""), command)
        case "help":
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True)
            for first, about in (*((command.usage, command.about) for command in slash.COMMANDS), *KEYS):
                table.add_row(Text(f"  {first}"), Text(about))
            out.print(table)
        case "quit":
            raise EOFError  # as Ctrl-D does


def _say(screen: ChatScreen, text: str) -> None:
    if screen.options.prompt_template is not None:
        text = screen.options.prompt_template.fill({"prompt": text})
    screen.answer(screen.chat.plan(text, screen.chat.log.end))


def _retry(screen: ChatScreen) -> None:
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


def _branch(screen: ChatScreen, number: int | None) -> None:
    """Go to a branch, or list them."""
    log = screen.chat.log
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


def _tokens(screen: ChatScreen) -> None:
    log, context, used = screen.chat.log, screen.chat.partner.context, 0
    if log.turns_to(log.end):
        used = len(screen.chat.plan_again().ids) + (0 if log.last_answer is None else len(log.last_answer.token_ids))
    if screen.chat.partner.kind == "alone":
        screen.note("each turn is read on its own, so no context fills up")
    elif context is None:
        screen.note(f"{used} tokens of the context are used; the model has no limit")
    else:
        screen.note(f"{used} tokens of the context are used, {max(context - used, 0)} of {context} are left")


def _last(log: ChatLog) -> Message:
    if log.last_answer is None:
        raise UsageError("nothing has been answered yet")
    return log.last_answer


def _change(screen: ChatScreen, name: str, argument: str) -> None:
    """A setting: /set, /unset, /preset or /system."""
    chat, key, before = screen.chat, argument.replace("-", "_"), screen.chat.base
    if name == "set" and not argument:
        values = "; ".join(f"{key} = {shown(value)}" for key, value in chat.own_values.items())
        screen.note(values or "nothing is set here")
        return
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

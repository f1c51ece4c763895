"""The commands of a chat that are not answered: the tree, what was said, settings, files."""

from __future__ import annotations

import base64
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from genctl.commands.chat import slash, thinking
from genctl.commands.chat.chat import Chat, news, setting
from genctl.commands.chat.line_input import SIGN
from genctl.commands.chat.turns import Message, drawn
from genctl.config.check import shown
from genctl.errors import UsageError, count
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import unbroken
from genctl.tree.journal import remember

KEYS = (
    ("Enter", "say it"),
    ("Alt-Enter, or \\ and Enter", "a new line"),
    ("Tab", "complete a command, a setting, a file"),
    ("Up, Down, Ctrl-R", "what was typed before, in all chats"),
    ("Ctrl-C", "end the answer; what was said stays. Twice: leave"),
    ("Ctrl-D", "leave"),
)
MOST_COPIED = 74_000  # bytes that terminals take for their clipboard at once


class Leave(Exception):
    """The person leaves."""


class SlashWork:
    """Does commands and prints what they come to. `open_chat` gives the chat in a file."""

    def __init__(self, chat: Chat, out: Console, *, scores: bool, open_chat: Callable[[Path], Chat]) -> None:
        self.chat, self.out, self.scores, self._open_chat = chat, out, scores, open_chat

    def do(self, typed: slash.Typed) -> None:
        """Do a command. Raises GenctlError if it cannot be done, Leave if the person leaves."""
        assert typed.command is not None
        name = typed.command.name
        if typed.command.local and self.chat.partner.session is None:
            raise UsageError(f"/{name} needs the token ids of a checkpoint, which a server does not tell")
        if name in ("set", "unset", "preset", "system"):
            self._change(name, typed.text)
        else:
            getattr(self, f"_{name}")(typed)

    def note(self, words: str, *whole: str) -> None:
        """Print a remark of the program, dimmed. No line is broken inside of a word, nor of the texts in `whole`."""
        parts = [widgets.visible(each) for each in whole]
        for line in unbroken(widgets.visible(words), max(self.out.width, 20), parts):
            self.out.print(Text(line, style=theme.DIM), soft_wrap=True)

    def show_end(self) -> None:
        """The last turn of the branch and its answer, as they were printed."""
        conversation = self.chat.story.conversation
        turns = conversation.turns_to(conversation.at)
        if turns > 1:
            self.note(f"({count(turns - 1, 'turn')} before)")
        for message in conversation.here[-2:]:
            text = thinking.split(message.content)[1] if message.role == "assistant" else message.content
            sign = SIGN if message.role == "user" else ""
            self.out.print(Text(f"{sign}{widgets.visible(text)}"), soft_wrap=False)

    # -- the tree ------------------------------------------------------------------------------------------------------

    def _undo(self, typed: slash.Typed) -> None:
        self._undone("undone", self.chat.story.undo())

    def _redo(self, typed: slash.Typed) -> None:
        self._undone("done again", self.chat.story.redo())

    def _undone(self, words: str, line: str) -> None:
        self.chat.refold()
        conversation = self.chat.story.conversation
        turns = count(conversation.turns_to(conversation.at), "turn")
        self.note(f"{words}: {_step(line)}; the chat has {turns}")

    def _branch(self, typed: slash.Typed) -> None:
        number = slash.number(typed, "branch")
        conversation = self.chat.story.conversation
        if number is not None:
            last = conversation.branch(number)
            self.chat.story.do("branch", str(number), node=last.node)
            self.show_end()
            return
        if not conversation.branches:
            self.note("nothing has been said yet")
        here = {message.number for message in conversation.here}
        for place, leaf in enumerate(conversation.branches, 1):
            sign = "*" if leaf.number in here else " "
            start = f"{sign} {place}  {count(leaf.turns, 'turn'):<9} "
            self.out.print(Text(start + widgets.first_words(leaf.content, max(self.out.width - len(start), 8))))

    def _tree(self, typed: slash.Typed) -> None:
        for before, words, here in drawn(self.chat.story.conversation, self.out.width):
            line = Text(before, style=theme.DIM).append(widgets.visible(words), theme.PLAIN if here else theme.DIM)
            self.out.print(widgets.fit(line, self.out.width))

    # -- what was said -------------------------------------------------------------------------------------------------

    def _think(self, typed: slash.Typed) -> None:
        last = self._last()
        thought = self.chat.thoughts.get(last.number) or thinking.split(last.content)[0]
        if not thought:
            raise UsageError("the last answer has no thought before it")
        self.out.print(Text(widgets.visible(thought), style=theme.DIM), soft_wrap=False)

    def _prompt(self, typed: slash.Typed) -> None:
        prompt = self.chat.partner.read(self.chat.plan_again().request)
        self.note(f"{count(len(prompt.ids), 'token')}:")
        self.out.print(Text(" ".join(map(str, prompt.ids))), soft_wrap=False)
        self.out.print(Text(widgets.visible(prompt.text), style=theme.DIM), soft_wrap=False)

    def _tokens(self, typed: slash.Typed) -> None:
        story, context = self.chat.story, self.chat.partner.context
        used = story.tree.length(story.tree.tip)
        words = (
            f"{count(used, 'token')} of the context is used" if used == 1 else f"{used} tokens of the context are used"
        )
        if self.chat.partner.kind == "alone":
            words = "each turn is read on its own, so no context fills up"
        elif context is None:
            words += "; the model has no limit"
        else:
            words += f", {max(context - used, 0)} of {context} are left"
        if story.left_out:
            words += f"; the first {count(story.left_out, 'message is', 'messages are')} left out of the prompt"
        self.note(words)

    def _copy(self, typed: slash.Typed) -> None:
        answer = thinking.split(self._last().content)[1]
        data = answer.encode("utf-8", "replace")
        if not self.out.is_interactive:
            raise UsageError("/copy: this terminal takes no text for the clipboard")
        if len(data) > MOST_COPIED:
            raise UsageError(f"/copy: the answer has {len(data)} bytes, and terminals take {MOST_COPIED} at once")
        sys.stdout.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\a")
        sys.stdout.flush()
        self.note(f"{count(len(answer), 'character')} sent to the clipboard (by OSC 52, if the terminal takes it)")

    def _last(self) -> Message:
        answer = self.chat.story.conversation.last_answer
        if answer is None:
            raise UsageError("nothing has been answered yet")
        return answer

    # -- settings and files --------------------------------------------------------------------------------------------

    def _change(self, name: str, argument: str) -> None:
        chat = self.chat
        if name == "set" and not argument:
            values = chat.own_values
            self.note("; ".join(f"{key} = {shown(value)}" for key, value in values.items()) or "nothing is set here")
            return
        key = argument.replace("-", "_")
        if name == "set" and key in chat.base.origins:
            value = {**vars(chat.base.generation), **vars(chat.base.runtime)}.get(key)
            held = "is not set" if value is None else f"= {shown(value)}"
            self.note(f"{key} {held} ({chat.base.origins[key]}); /set {key}=VALUE sets it")
            return
        before = chat.base
        chat.change(name, argument)
        for line in news(before, chat.base):
            self.note(line)
        if name == "system":
            self.note("the system message is set" if argument else "there is no system message")
        elif name == "set":
            self.note(f"set {setting(argument)}")
        else:
            self.note(f"{name} {argument}")

    def _scores(self, typed: slash.Typed) -> None:
        if not self.scores:
            self.chat.base_plan.require_logprobs("/scores")
        self.scores = not self.scores
        self.note(f"token probabilities are {'shown under each answer' if self.scores else 'no longer shown'}")

    def _save(self, typed: slash.Typed) -> None:
        if typed.text:
            new = Path(typed.text).expanduser()
            self.chat.story.save(new)
            remember(new)
        path = self.chat.story.path
        if path is None:
            self.note("nothing has been said yet, so nothing is saved")
        else:
            quoted = shlex.quote(str(path))
            self.note(f"saved in {quoted}", quoted)

    def _help(self, typed: slash.Typed) -> None:
        width = max(len(command.usage) for command in slash.COMMANDS)
        rows = [(command.usage, command.about) for command in slash.COMMANDS]
        for first, about in (*rows, *KEYS):
            text = Text(about).wrap(self.out, max(self.out.width - width - 4, 20))
            for place, line in enumerate(text):
                line.rstrip()
                self.out.print(Text(f"  {first if not place else '':<{width}}  ").append_text(line))

    def _quit(self, typed: slash.Typed) -> None:
        raise Leave


def _step(line: str) -> str:
    """What a step of the tree was, in words."""
    name, _, rest = line.partition(" ")
    if name in ("say", "edit"):
        number, text = ("", rest) if name == "say" else rest.split(" ", 1)
        shown = widgets.first_words(json.loads(text), 40)
        return f"turn {number}, {shown}" if number else f"the turn {shown}"
    words = {
        "explore": f"{widgets.first_words(rest, 40)}, in genctl explore",
        "read": "another answer",
        "answer": "the answer",
        "message": "a message",
        "branch": f"going to branch {rest}",
    }
    words["leave-out"] = f"leaving out {count(int(rest), 'message')}" if name == "leave-out" else ""
    return words.get(name, f"/{widgets.first_words(line, 40)}")

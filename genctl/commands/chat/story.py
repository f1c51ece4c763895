"""A chat as a tree of tokens: what each turn writes to it, and the conversation that the tree adds up to.

A step of the tree is a line: `say "Hello"` and `edit 2 "Hi"` (their tokens are given), `answer 57` (generated after
node 57), `read` (the prompt of the last turn again, before another answer), `message {"role": …}`, `branch 3`,
`leave-out 2`, and settings: `set temperature=0.7`, `unset KEY`, `preset NAME`, `system TEXT`. The conversation is the
fold of the steps that are not undone, and nothing else decides what it is. The steps of `genctl explore --open` are in
the same file, and no part of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from genctl.commands.chat.turns import Conversation, Message
from genctl.errors import GenctlError, InputError, OutputError, UsageError
from genctl.events import UNKNOWN_ID, Token
from genctl.io.output import open_beside
from genctl.io.sink import Sink
from genctl.tree.changes import Begun, Change, Reached, Redone, Settled, Undone
from genctl.tree.file_settings import FileSettings, found_of
from genctl.tree.journal import Differs, NotAChat, SavedTree, TreeFile, read_tree
from genctl.tree.nodes import ROOT, Step, Tree

GIVEN = ("say", "edit", "read")  # steps that an answer follows
SETTINGS = ("set", "unset", "preset", "system")
MOST = 2**26  # characters of all answers together; a token has one, at least
STEPS = (*GIVEN, *SETTINGS, "answer", "message", "branch", "leave-out")


class Story(SavedTree):
    """The tree of a chat, in a file or in memory, and what it adds up to.

    `new_file` opens the file with the first step, by the words of that; without it there is none. A file that replaces
    another does so once it has an answer, or a message. `file`: which settings of the file hold. `most` bounds the
    characters of all answers.
    """

    def __init__(
        self,
        tree: Tree,
        journal: TreeFile | None = None,
        new_file: Callable[[str], Sink] | None = None,
        file: FileSettings | None = None,
        most: int = MOST,
    ) -> None:
        super().__init__(tree, journal)
        self.new_file = new_file
        self.file = file or FileSettings()
        self._most = most
        self._start = ROOT  # of the answer that is being written
        self._entry = 0
        self._held = ""  # of it came again, but ends within a piece that the file has
        self._fold()

    @classmethod
    def open(cls, path: Path, file: FileSettings | None = None) -> Story:
        """The chat in a file, to be continued. `file`: which of its settings hold.

        Raises InputError, OutputError or UsageError.
        """
        journal, tree = TreeFile.reopen(path)
        try:
            return cls._of(tree, path, journal, file=file or FileSettings("chat", found_of(path)))
        except InputError:
            journal.leave()
            raise

    @classmethod
    def look(cls, path: Path) -> Story:
        """The chat in a file, to look at: another process may be writing it. Raises InputError."""
        return cls._of(read_tree(path), path)

    @classmethod
    def _of(cls, tree: Tree, path: Path, journal: TreeFile | None = None, file: FileSettings | None = None) -> Story:
        steps = [*tree.steps, *tree.undone]
        others = [step for step in steps if not _is_own(step)]
        if tree.opened.prompt or (others and len(others) == len(steps)):
            command = f": it has the command {others[0].line.partition(' ')[0]!r:.40}" if others else ""
            hint = f"genctl explore --open {path} continues it"
            raise NotAChat(f"{path} is a tree of genctl explore, not a chat{command}", hint=hint)
        try:
            return cls(tree, journal, file=file)
        except (ValueError, LookupError, TypeError, GenctlError) as error:
            raise InputError(f"{path} is damaged: its steps are not those of a chat ({error})") from None

    @property
    def path(self) -> Path | None:
        """The file; None while there is none."""
        return None if self.journal is None else self.journal.path

    def save(self, path: Path) -> None:
        """Go on in a new file, which has everything so far. Raises OutputError; then it goes on as before."""
        if self.journal is None:
            sink = open_beside(path)
            self.new_file = lambda words: sink
            return
        self._copy_to(path)
        journal, tree = TreeFile.reopen(path)
        self.journal.leave()  # it may be gone by now, which is why it is saved elsewhere
        self.journal, self.tree = journal, tree
        self._fold()

    def copy(self) -> Path:
        """A copy of the file beside it, under a new name, for another program to open. Raises OutputError."""
        assert self.journal is not None
        path = self.journal.path
        names = (f"{path.stem}-copy{'' if number == 1 else number}{path.suffix}" for number in count(1))
        return self._copy_to(next(each for each in map(path.with_name, names) if not os.path.lexists(each)))

    def _copy_to(self, path: Path) -> Path:
        assert self.journal is not None
        try:
            sink = open_beside(path)
        except OutputError as error:
            if os.path.lexists(path):
                error.hint = f"/load {path} continues the chat in it"
            raise
        try:
            sink.write(self.journal.content())
            sink.close()
        finally:
            sink.abandon(keep=False)
        return path

    def close(self) -> None:
        """Close the file; one that was to replace another, and has nothing to keep, is removed. Raises OutputError."""
        if self.journal is not None and self.journal.kept:
            self.journal.close()
        else:
            self.leave()

    def leave(self) -> None:
        """Close the file as it is: an error is being reported."""
        if self.journal is not None:
            self.journal.leave() if self.journal.kept or self.conversation.messages else self.journal.discard()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def change(self, change: Change) -> None:
        """Let a change happen, in the tree, its file and the conversation. Raises OutputError."""
        if isinstance(change, Begun) and self.journal is None and self.new_file is not None:
            self.journal = TreeFile.create(self.new_file(change.line.partition(" ")[2]), self.tree.opened)
        try:
            super().change(change)
        except OutputError:
            with suppress(OutputError):  # the chat is what its file has; there may be room again for the next turn
                assert self.journal is not None
                self.tree = self.journal.recovered()
                self._fold()
            raise
        if isinstance(change, (Settled, Redone)):
            self._take(self.tree.steps[-1])
        elif isinstance(change, Undone):
            self._untake()

    @contextmanager
    def again(self) -> Iterator[str]:
        """As in a tree; the conversation goes on from before the step."""
        self._untake()
        try:
            with super().again() as line:
                yield line
        finally:
            if self.tree.command is not None:
                self._take(self.tree.steps[-1])

    def do(self, name: str, argument: str = "", *, node: int | None = None) -> None:
        """A step without tokens. The chat is then at `node`, or stays where it is."""
        self.change(Begun(f"{name} {argument}".rstrip(), step=True))
        self._settle(self.node if node is None else node)
        if name == "message":
            self._keep()

    @property
    def node(self) -> int:
        """Where the branch of the conversation ends, wherever another program has gone in the tree."""
        at = self.conversation.at
        return ROOT if at is None else self.conversation.messages[at].node

    def give(self, line: str, ids: Sequence[int], texts: Sequence[str]) -> int:
        """A step whose tokens are given: a prompt, from the root on. Returns the node at its end.

        Raises UsageError if it begins with other tokens than the root has.
        """
        root = self.tree.opened.prompt_ids
        if tuple(ids[: len(root)]) != root:
            raise UsageError("the prompt begins with other tokens than this chat did", hint="begin a new chat for it")
        self.change(Begun(line, step=True))
        at = ROOT
        for id, text in zip(ids[len(root) :], texts[len(root) :], strict=True):
            # a given token has no probability to speak of: it counts as certain
            token = _named(Token(id, 0.0, text))
            known = self.tree.child(at, token.id)
            at = self.put(at, token, "edit", 0, None, at) if known is None else known
        self._settle(at)
        return at

    def complete(self, ids: Sequence[int], texts: Sequence[str]) -> int | None:
        """Finish giving the tokens of the last turn, which was cut short; the node at their end.

        None if other tokens were given, or if it is not the last step.
        """
        step = self.tree.steps[-1]
        if not _is_own(step) or _name(step) not in GIVEN:
            return None
        if self.tree.command is None:
            return step.end if self.tree.ids(step.end) == tuple(ids) else None
        try:
            with self.again() as line:
                return self.give(line, ids, texts)
        except Differs:
            return None

    def begin_answer(self, start: int, prefill: str, knobs: Mapping[str, Any]) -> None:
        """An answer begins after a node, with `knobs` above the settings of the chat's beginning."""
        self._start, self._entry, self._held = start, self.entry(knobs), ""
        line = f"answer {start}" + (f" {_quoted(prefill)}" if prefill else "")
        self.change(Begun(line, step=True, run=self.tree.runs + 1))
        if start != self.tree.tip:
            self.change(Reached(start))

    @property
    def cut_off(self) -> bool:
        """Whether the last answer was cut off, because the process was killed."""
        command = self.tree.command
        return command is not None and not command.tool and command.line.startswith("answer ")

    @property
    def unanswered(self) -> bool:
        """Whether the last turn has no answer yet, because the process was killed, or another program took it back."""
        last = next((step for step in reversed(self.tree.steps) if _is_own(step)), None)
        return last is not None and _name(last) in GIVEN

    def written(self) -> tuple[int, str, list[int]]:
        """Of the answer that was cut off: the node that it follows, its prefill and its nodes."""
        assert self.tree.command is not None
        start, _, prefill = self.tree.command.line.removeprefix("answer ").partition(" ")
        return int(start), json.loads(prefill) if prefill else "", self.tree.path(self.tree.tip, above=int(start))

    def token(self, token: Token, seed: int | None) -> None:
        """The next token of the answer. Raises Differs if one that was cut off comes out otherwise."""
        for piece in self._pieces(token):
            self.put(self.tree.tip, piece, "generate", self._entry, seed, self._start)

    def _pieces(self, token: Token) -> Iterator[Token]:
        """A token, in the pieces that the file has while an answer comes again: a server that tells no ids may cut the
        same text otherwise."""
        node = self.expected
        if node is None or (token.id > UNKNOWN_ID and node.id > UNKNOWN_ID):
            yield _named(token)
            return
        self._held += token.text
        while node is not None and self._held.startswith(node.text):
            self._held = self._held.removeprefix(node.text)
            yield Token(node.id, node.logprob, node.text)
            node = self.expected
        if node is not None and not node.text.startswith(self._held):
            raise Differs
        if node is None and self._held:
            yield _named(replace(token, id=UNKNOWN_ID, text=self._held))

    def end_answer(self) -> Message:
        """The answer is over. Of one that was cut off everything stays that was written, also beyond a smaller limit.

        It is on the disk when this returns.
        """
        self.take_rest()
        self._settle(self.tree.tip)
        self._keep()
        return self.conversation.messages[-1]

    def abandon(self) -> None:
        """Take back an answer that failed, and the turn that it answers. One that was cut off stays as it was."""
        if self.repeats:
            return
        self._settle(self.tree.tip)
        self.change(Undone())
        if self.tree.steps and _name(self.tree.steps[-1]) in GIVEN:
            self.change(Undone())

    def undo(self) -> str:
        """Take back the last step, and with the only answer to a turn that turn. Returns its line; `explore …` where
        genctl explore has done it.

        Raises UsageError.
        """
        if not self.tree.steps:
            raise UsageError("there is nothing to undo")
        line = _line(self.tree.steps[-1])
        self.change(Undone())
        if line.startswith("answer ") and self.tree.steps and _name(self.tree.steps[-1]) in GIVEN:
            line = self.tree.steps[-1].line
            self.change(Undone())
        return line

    def redo(self) -> str:
        """Do again what was undone last. Returns its line. Raises UsageError."""
        if not self.tree.undone:
            raise UsageError("there is nothing to redo")
        line = _line(self.tree.undone[-1])
        self.change(Redone())
        if _name(self.tree.steps[-1]) in GIVEN and self.tree.undone and _name(self.tree.undone[-1]) == "answer":
            self.change(Redone())
        return line

    def _settle(self, at: int) -> None:
        self.change(Settled(cursor=at, tip=at))

    def _keep(self) -> None:
        if self.journal is not None:
            self.journal.keep()

    # -- the conversation ----------------------------------------------------------------------------------------------

    def _fold(self) -> None:
        """Read the conversation off the tree again."""
        self.conversation = Conversation()
        self.settings: list[tuple[str, str]] = []  # name and argument, in order
        self.left_out = 0  # the first messages of a branch that are left out of the prompt
        self._room = self._most  # characters of further answers
        # before each step: messages, where the chat was, settings, messages left out, room
        self._before: list[tuple[int, int | None, int, int, int]] = []
        for step in self.tree.steps:
            self._take(step)

    def _untake(self) -> None:
        """Take the last step away from the conversation."""
        messages, at, settings, self.left_out, self._room = self._before.pop()
        self.conversation.go_back(messages, at)
        del self.settings[settings:]

    def _take(self, step: Step) -> None:
        """Add one step to the conversation."""
        before = len(self.conversation.messages), self.conversation.at, len(self.settings), self.left_out, self._room
        self._before.append(before)
        name, _, argument = step.line.partition(" ")
        conversation, end = self.conversation, step.end
        if name == "read" or not _is_own(step):
            return
        if name == "say":
            conversation.add("user", json.loads(argument), conversation.at, end)
        elif name == "edit":
            number, _, text = argument.partition(" ")
            conversation.add("user", json.loads(text), conversation.turn(int(number)).parent, end)
        elif name == "message":
            message = json.loads(argument)
            conversation.add(message["role"], message["content"], conversation.at, end)
        elif name == "answer":
            start, _, prefill = argument.partition(" ")
            text = self._text(int(start), end)
            question = conversation.turn(None).number
            conversation.add("assistant", (json.loads(prefill) if prefill else "") + text, question, end)
        elif name == "branch":
            conversation.at = conversation.branch(int(argument)).number
        elif name == "leave-out":
            self.left_out = int(argument)
        else:
            self.settings.append((name, argument))

    def _text(self, start: int, end: int) -> str:
        """The text of an answer. Answers of an edited file may share the tokens of one, so all have a bound."""
        text = ""
        if self.tree.depths[end] - self.tree.depths[start] <= self._room:
            text = "".join(self.tree.nodes[node].text for node in self.tree.path(end, above=start))
        self._room -= max(self.tree.depths[end] - self.tree.depths[start], len(text))
        if self._room < 0:
            raise InputError(f"its answers have more than {MOST:,} characters together")
        return text


def text_id(text: str) -> int:
    """The id of a token that a server tells only the text of: below the ids of a vocabulary, the same for one text."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return UNKNOWN_ID - 1 - int.from_bytes(digest, "big")


def _named(token: Token) -> Token:
    """A token whose id a server does not tell, with the id of its text."""
    return token if token.id > UNKNOWN_ID else replace(token, id=text_id(token.text))


def said(text: str) -> str:
    """The step of a turn."""
    return f"say {_quoted(text)}"


def edited(number: int, text: str) -> str:
    """The step of a turn that is said again in other words."""
    return f"edit {number} {_quoted(text)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _name(step: Step) -> str:
    return step.line.partition(" ")[0]


def _line(step: Step) -> str:
    return step.line if _is_own(step) else f"explore {step.line}"


def _is_own(step: Step) -> bool:
    """Whether a step is one of the chat, and not of `genctl explore`."""
    return not step.tool and _name(step) in STEPS

"""A tree at work: commands are done one at a time, and finished after a kill. `language` has a row for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from genctl.config.layers import Layer
from genctl.engines.protocol import never
from genctl.engines.session import Session
from genctl.errors import InputError
from genctl.io.sink import Sink
from genctl.tree.beside import Second
from genctl.tree.file_settings import FileSettings, found_of
from genctl.tree.journal import TreeFile
from genctl.tree.language import COMMANDS, MEMORY, Call, parse
from genctl.tree.nodes import Tree
from genctl.tree.results import At, Result
from genctl.tree.workspace import Workspace, opened_of


class Explorer:
    """A tree at your fingers. `do` yields what a command does while it does it; one command at a time.

    Another thread may read `tree` meanwhile, and call `pause`.
    """

    def __init__(self, space: Workspace) -> None:
        self.space = space
        self.interrupted: Callable[[], str] = never  # why what is being written has to end, besides `pause`
        self.second: Second | None = None  # another distribution on the same tree
        self._reason = ""
        self.line = ""  # of the command that is done
        self.typed = True  # whether commands are the user's: not those of a file that is opened

    @classmethod
    def begin(
        cls,
        session: Session,
        prompt: str,
        prompt_ids: Sequence[int],
        layers: Sequence[Layer] = (),
        *,
        seed: int = 0,
        path: Path | Sink | None = None,
        memory: int = MEMORY,
        shown: str = "",
    ) -> Explorer:
        """A new tree, saved at `path` (or in what `open_beside` has opened) if that is given. Raises GenctlError."""
        if not prompt_ids:
            raise InputError("the prompt tokenises to nothing, and there is nothing to continue")
        opened = opened_of(session, prompt, prompt_ids, seed, layers, shown=shown)
        space = Workspace(session, Tree(opened), None, memory)
        if path is not None:
            space.journal = TreeFile.create(path, opened)
        return cls(space)

    @classmethod
    def reopen(
        cls, session: Session, path: Path, *, memory: int = MEMORY, file: FileSettings | None = None
    ) -> Explorer:
        """A saved tree, to be continued. `file`: which of its settings hold. Raises GenctlError."""
        journal, tree = TreeFile.reopen(path)
        try:
            held = file or FileSettings("tree", found_of(path))
            explorer = cls(Workspace(session, tree, journal, memory, held))
        except BaseException:
            journal.leave()
            raise
        if tree.is_chat and journal.unfinished and not tree.steps[-1].tool:
            journal.unfinished = ()  # a turn of `genctl chat`, or its answer: what is written of it stays
        return explorer

    @property
    def tree(self) -> Tree:
        """The tree; it changes by commands alone."""
        return self.space.tree

    def close(self) -> None:
        """Close the file. Raises OutputError if another program has taken it away."""
        if self.space.journal is not None:
            self.space.journal.close()

    def leave(self) -> None:
        """Close the file as it is: an error is being reported."""
        if self.space.journal is not None:
            self.space.journal.leave()

    # -- commands ------------------------------------------------------------------------------------------------------

    def do(self, call: Call | str) -> Iterator[Result]:
        """Do a command, and yield its results as they come. Raises GenctlError."""
        call = parse(call) if isinstance(call, str) else call
        command = COMMANDS[call.name]
        self._reason, self.line = "", call.line or call.name
        if command.kind == "move":
            at = command.function(self.tree, self.here(), **call.arguments)
            self.space.settle(cursor=at.cursor, tip=at.tip)
            yield at
            return
        yield from command.function(self, **call.arguments)
        if command.kind in ("write", "fork"):
            yield self.here()

    def all(self, call: Call | str) -> list[Result]:
        """Do a command to its end."""
        return list(self.do(call))

    def resume(self) -> Iterator[Result]:
        """Finish the command that was cut short when the process ended; nothing, if there is none.

        What the file has already is not written again. Raises `journal.Differs` if the same tokens do not come out.
        """
        if self.space.journal is None or not self.space.journal.unfinished:
            return
        with self.space.again() as line:
            self.typed = False
            try:
                yield from self.do(line)
            finally:
                self.typed = True

    def pause(self, reason: str = "interrupted") -> None:
        """End what is being written at its next token."""
        self._reason = reason

    def stop_reason(self) -> str:
        """Why what is being written has to end; "" if it may go on."""
        return self._reason or self.interrupted()

    def here(self, note: str = "") -> At:
        """Where the cursor is."""
        return At(self.tree.cursor, self.tree.tip, note)

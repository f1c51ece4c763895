"""The commands of a tree, done: everything that a key does is one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from genctl.config.layers import Layer
from genctl.config.presets import is_path
from genctl.engines.local.session import Session
from genctl.engines.protocol import never
from genctl.errors import InputError, ModelError, PresetError, UsageError
from genctl.io.sink import Sink
from genctl.tree import looking, writing
from genctl.tree.beside import Second
from genctl.tree.changes import Redone, Undone
from genctl.tree.file_settings import FileSettings, found_of
from genctl.tree.journal import TreeFile
from genctl.tree.language import MEMORY, Call, parse, preset_values
from genctl.tree.nodes import ROOT, Tree
from genctl.tree.results import At, Bookmarked, BranchText, Continuation, Result, Settings
from genctl.tree.workspace import Workspace, opened_of

FOUND = 20  # tokens that `find` lists


class Explorer:
    """A tree at your fingers. `do` yields what a command does while it does it; one command at a time.

    Another thread may read `tree` meanwhile, and call `pause`.
    """

    def __init__(self, space: Workspace) -> None:
        self.space = space
        self.interrupted: Callable[[], str] = never  # why what is being written has to end, besides `pause`
        self.second: Second | None = None  # another distribution on the same tree
        self._reason = ""
        self._typed = True  # whether commands are the user's: not those of a file that is opened

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
        self._reason = ""
        method = getattr(self, f"_{call.name}")
        yield from method(call.line or call.name, **call.arguments)

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
            self._typed = False
            try:
                yield from self.do(line)
            finally:
                self._typed = True

    def pause(self, reason: str = "interrupted") -> None:
        """End what is being written at its next token."""
        self._reason = reason

    def _interrupted(self) -> str:
        return self._reason or self.interrupted()

    # -- moves ---------------------------------------------------------------------------------------------------------

    def _move(self, cursor: int, tip: int | None = None, note: str = "") -> At:
        at = self.space.settle(cursor=cursor, tip=self.tree.tip if tip is None else tip)
        return At(at.cursor, at.tip, note)

    def _left(self, line: str, n: int) -> Iterator[Result]:
        cursor = self.tree.cursor
        node = self.tree.above(cursor, max(self.tree.depths[cursor] - n, 0))
        yield self._move(node, note="" if node != self.tree.cursor else "this is the beginning")

    def _right(self, line: str, n: int) -> Iterator[Result]:
        cursor, tip = self.tree.cursor, self.tree.tip
        node = self.tree.above(tip, min(self.tree.depths[cursor] + n, self.tree.depths[tip]))
        yield self._move(node, note="" if node != cursor else "this is the end of the branch")

    def _up(self, line: str) -> Iterator[Result]:
        yield self._sibling(-1)

    def _down(self, line: str) -> Iterator[Result]:
        yield self._sibling(1)

    def _sibling(self, by: int) -> At:
        siblings = self.tree.children(self.tree.cursor)
        under = self.tree.under()
        if under is None or len(siblings) < 2:
            return self._move(self.tree.cursor, note="no branches part here")
        place = (siblings.index(under) + by) % len(siblings)
        return self._move(self.tree.cursor, self.tree.end_of(siblings[place]))

    def _start(self, line: str) -> Iterator[Result]:
        yield self._move(ROOT)

    def _end(self, line: str) -> Iterator[Result]:
        yield self._move(self.tree.tip)

    def _goto(self, line: str, name: str) -> Iterator[Result]:
        node = self.tree.named(name)
        yield self._move(node, self.tree.tip if self.tree.is_on(node, self.tree.tip) else self.tree.end_of(node))

    def _next(self, line: str, entropy: float) -> Iterator[Result]:
        tree = self.tree
        ahead = range(tree.depths[tree.cursor] + 2, tree.depths[tree.tip] + 1)
        yield self._uncertain((tree.above(tree.tip, depth) for depth in ahead), entropy, "after")

    def _previous(self, line: str, entropy: float) -> Iterator[Result]:
        yield self._uncertain(self.tree.upwards(self.tree.cursor), entropy, "before")

    def _uncertain(self, nodes: Iterable[int], entropy: float, where: str) -> At:
        for node in nodes:
            if (self.tree.nodes[node].entropy or 0.0) >= entropy:
                return self._move(self.tree.nodes[node].parent)
        note = f"no token {where} this one was chosen with an entropy of {entropy:g} nats or more"
        return self._move(self.tree.cursor, note=note)

    # -- writing -------------------------------------------------------------------------------------------------------

    def _generate(self, line: str, n: int | None) -> Iterator[Result]:
        yield from writing.generate(self.space, line, self.tree.cursor, n, self._interrupted)
        yield self._here()

    def _sample(self, line: str, k: int, n: int | None) -> Iterator[Result]:
        yield from writing.sample(self.space, line, self.tree.cursor, k, n, self._interrupted)
        yield self._here()

    def _beams(self, line: str, k: int, n: int | None) -> Iterator[Result]:
        yield from writing.beams(self.space, line, self.tree.cursor, k, n, self._interrupted)
        yield self._here()

    def _take(self, line: str, token: int | str, n: int | None) -> Iterator[Result]:
        id = self._token(token)
        yield from writing.take(self.space, line, self.tree.cursor, id, n, self._interrupted)
        yield self._here()

    def _token(self, token: int | str) -> int:
        """The id of a rank, of id:N, or of a text that is one token."""
        distribution = self.space.distribution(self.tree.cursor)
        if isinstance(token, int):
            if token > len(distribution):
                raise UsageError(f"rank {token}: the model has {len(distribution)} tokens")
            return distribution.at(token).id
        from genctl.models.watched import watched_ids

        try:
            id = watched_ids(self.space.session.loaded, [token])[0]
        except UsageError as error:
            raise UsageError(error.message.replace("--watch", "take"), hint=error.hint) from None
        if id >= len(distribution):
            raise UsageError(f"take id:{id}: the model writes the ids 0 to {len(distribution) - 1}")
        return id

    def _edit(self, line: str, text: str) -> Iterator[Result]:
        base, ids = self._tokenised(self.tree.cursor, text)
        with self.space.step(line):
            yield from self.space.write_given(base, ids, "edit")
        yield self._here()

    def _tokenised(self, node: int, text: str) -> tuple[int, tuple[int, ...]]:
        """Where a typed text forks, and its tokens: they may begin inside of the token before the cursor."""
        from genctl.decode.token_healing import heal
        from genctl.models.text import check_ids, continuation

        loaded, tree = self.space.session.loaded, self.tree
        if loaded.tokenizer is None:
            raise ModelError(
                f"{loaded.name} has no tokenizer, so a text cannot be typed", hint="take id:N takes a token"
            )
        before = ""
        try:
            healed = heal(loaded.tokenizer, tree.ids(node), self.space.session.forward.vocab_size)
        except UsageError:  # a tokenizer whose text is not the sum of its tokens
            healed = None
        if healed is not None and len(healed.ids) >= tree.length(ROOT):
            before = healed.text
            while tree.length(node) > len(healed.ids):
                node = tree.nodes[node].parent
        ids = tuple(continuation(loaded.tokenizer, before + text))
        check_ids(ids, self.space.session.forward.vocab_size)
        return node, ids

    def _expand(self, line: str, mass: float, depth: int, nodes: int | None = None) -> Iterator[Result]:
        from genctl.tree import expanding

        start = self.tree.cursor
        for result in expanding.expand(self.space, line, start, mass, depth, nodes, self._interrupted):
            if isinstance(result, Continuation) and self.second is not None:
                beside, parts = self.second.total(result.node, start)
                result = replace(result, beside=beside, parts=parts)
            yield result
        yield self._here()

    # -- undo, settings, bookmarks -------------------------------------------------------------------------------------

    def _undo(self, line: str) -> Iterator[Result]:
        yield self._back(Undone(), bool(self.tree.steps), "nothing is left to undo")

    def _redo(self, line: str) -> Iterator[Result]:
        yield self._back(Redone(), bool(self.tree.undone), "nothing is left to redo")

    def _back(self, change: Undone | Redone, possible: bool, note: str) -> At:
        if possible:
            self.space.change(change)
        return At(self.tree.cursor, self.tree.tip, "" if possible else note)

    def _set(self, line: str, key: str, value: Any) -> Iterator[Result]:
        self._name({key: value})
        yield self._with({**self.tree.knobs, key: value}, line)

    def _preset(self, line: str, name: str) -> Iterator[Result]:
        if not self._typed and self.space.file.found == "unnamed" and is_path(name):
            raise InputError(f"the tree was cut short in {line!r:.80}: a file does not choose which files are read")
        values = preset_values(name)
        self._name(values)
        yield self._with(values, line)

    def _name(self, values: dict[str, Any]) -> None:
        if self._typed:
            self.space.file.name(values)

    def _reset(self, line: str) -> Iterator[Result]:
        yield self._with({}, line)

    def _with(self, values: dict[str, Any], line: str) -> Settings:
        try:
            resolved = self.space.overlaid(values)
        except PresetError as error:
            raise UsageError(error.message, hint=error.hint) from None
        self.space.session.plan(resolved)
        notes = looking.drawing(self.space.resolved().generation, resolved.generation)
        with self.space.step(line):
            self.space.settle(settings=self.space.entry(values))
        return Settings(values, notes)

    def _bookmark(self, line: str, name: str) -> Iterator[Result]:
        node, marks = self.tree.cursor, self.tree.bookmarks
        name = name or next(f"m{number}" for number in range(1, len(marks) + 2) if f"m{number}" not in marks)
        with self.space.step(line):
            self.space.settle(bookmarks={**marks, name: node})
        yield Bookmarked(name, node)

    # -- looking -------------------------------------------------------------------------------------------------------

    def _show(self, line: str, n: int) -> Iterator[Result]:
        yield looking.shown(self.space, self.tree.cursor, n)

    def _find(self, line: str, text: str) -> Iterator[Result]:
        yield looking.found(self.space, self.tree.cursor, text, FOUND)

    def _why(self, line: str) -> Iterator[Result]:
        under = self.tree.under()
        id = self.space.distribution(self.tree.cursor).at(1).id if under is None else self.tree.nodes[under].id
        yield looking.why(self.space, self.tree.cursor, id)

    def _layers(self, line: str) -> Iterator[Result]:
        under = self.tree.under()
        yield from looking.layers(self.space, self.tree.cursor, None if under is None else self.tree.nodes[under].id)

    def _compare(self, line: str, names: tuple[str, ...]) -> Iterator[Result]:
        nodes = [self.tree.named(name) for name in names]
        a, b = nodes if len(nodes) == 2 else (nodes[0], self.tree.tip)
        yield looking.compared(self.space, a, b)

    def _beside(self, line: str) -> Iterator[Result]:
        if self.second is None:
            raise UsageError("there is one distribution", hint="--models A,B or --beside gives another one")
        yield from self.second.along(self.tree.tip)

    def _text(self, line: str) -> Iterator[Result]:
        yield BranchText(self.tree.tip, self.space.text(self.tree.tip), self.tree.opened.prompt)

    _copy = _text

    def _repeat(self, line: str) -> Iterator[Result]:
        yield looking.repeat(self.space, self.tree.tip)

    def _here(self) -> At:
        return At(self.tree.cursor, self.tree.tip)

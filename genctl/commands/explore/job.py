"""`genctl explore` at work: a tree is made or opened, and expanded, done by a script, or shown on a screen."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.commands.engine_choice import LOCAL, EngineChoice
from genctl.commands.explore import formats
from genctl.commands.explore.options import (
    ExploreOptions,
    check_opened,
    check_screen,
    expansion,
)
from genctl.commands.job import request_of, start_seed
from genctl.commands.old_job import OldJob as Job
from genctl.commands.options import memory_bytes
from genctl.config.layers import Layer, Resolved, row_layer
from genctl.documents import reader
from genctl.documents.reader import Unreadable
from genctl.errors import GenctlError, InputError, UsageError
from genctl.io import writers
from genctl.io.output import open_beside
from genctl.io.readers import all_rows
from genctl.io.rows import BadRow, InputRow
from genctl.io.sink import Sink
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.progress_bars import LoadingBar
from genctl.tree.commands import MEMORY, Call, parse_script
from genctl.tree.results import Continuation, Covered, Result

if TYPE_CHECKING:
    from genctl.engines.session import Session
    from genctl.tree.explorer import Explorer


class TreeOutput:
    """Writes results as they come: rows of --expand, or what the commands of a script come to.

    To a sink in a format, or with `show` on a terminal, a line at a time.
    """

    def __init__(self, options: ExploreOptions, sink: writers.Sink | None, show: Callable[[str], object]) -> None:
        self.expanding = options.expand is not None
        self.covered: Covered | None = None  # what the newest expansion came to
        self._sink, self._show = sink, show
        self._rows = itertools.count()
        self._writer: writers.Writer | None = None
        if sink is not None and options.format == "tsv":
            self._writer = writers.TsvWriter(sink, formats.COLUMNS)
        elif sink is not None and options.format != "text":
            self._writer = writers.open_writer(options.format, sink, on_error=lambda record: None)

    def put(self, result: Result) -> None:
        """Write or show one result. Raises OutputError."""
        if isinstance(result, Covered):
            self.covered = result
        if self.expanding and not isinstance(result, Continuation):
            return
        if self._writer is not None:
            is_row = self.expanding and isinstance(result, Continuation)
            self._writer.write(formats.record(result, next(self._rows) if is_row else None))
            return
        for line in formats.lines_of(result, tabs=self.expanding and self._sink is not None):
            if self._sink is None:
                self._show(line)
            else:
                self._sink.write(f"{line}\n".encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """Complete the output."""
        closing = self._writer or self._sink
        if closing is not None:
            closing.close()


LONGEST_SCRIPT = 1 << 20  # bytes


class ExploreJob(Job[ExploreOptions]):
    """One run of `genctl explore`."""

    def __init__(self, options: ExploreOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        super().__init__(options, interrupt, choice)
        self.open_consoles()
        self.row: InputRow | None = None  # the prompt; None for a tree that is opened
        self.saved: Sink | None = None  # the file of --save, until it is the tree's

    def prepare(self) -> int | None:
        """Settings without those of the checkpoint, and the commands."""
        options = self.options
        check_screen(options)
        self.memory = MEMORY if options.memory is None else memory_bytes(options.memory)
        self.calls = self._script()
        limits = expansion(options)
        if limits is not None:
            self.calls = [Call("expand", limits, f"expand {options.expand}")]
        if options.open is not None:
            check_opened(options)
            self._take_saved_model(Path(options.open))
        return super().prepare()

    def _script(self) -> list[Call]:
        """The commands of --script. Raises UsageError with all that cannot be read, InputError."""
        name, options = self.options.script, self.options
        if name is None:
            return []
        shown = f"--script {name}"
        if name == "-":
            shown = "standard input"
            if options.input == "-" or (options.input is None and not options.arguments and options.open is None):
                raise UsageError("--script - reads commands from standard input: give the prompt as an argument")
            if sys.stdin is None:
                raise InputError("cannot read standard input: it is closed")
        try:
            lines = reader.text_lines(reader.text(sys.stdin.buffer if name == "-" else name, LONGEST_SCRIPT))
        except Unreadable as error:
            raise InputError(f"cannot read {shown}: {error}") from None
        return parse_script(lines, shown.removeprefix("--script "))

    def _take_saved_model(self, path: Path) -> None:
        """Load the checkpoint that the tree was made with, if no flag names another place of it.

        Nothing is downloaded because a file names it.
        """
        from genctl.tree.saved import read_tree

        values = {"model": read_tree(path).opened.model, "offline": True}
        flags = self.options.flags
        if any("model" in layer.values or "offline" in layer.values for layer in flags):
            del values["offline"]
        layer = Layer("saved", values, dict.fromkeys(values, f"--open {path}"), "user")
        self.options = replace(self.options, flags=[layer, *flags])

    def check_early(self, resolved: Resolved) -> None:
        """Raises UsageError for settings that cannot be used together with a tree."""
        super().check_early(resolved)
        if resolved.runtime.backend is not None:
            raise UsageError(
                f"backend = {resolved.runtime.backend} ({resolved.origins['backend']}): a tree needs the distribution "
                "over all token ids, and a server gives a few",
                hint="genctl chat talks to servers",
            )

    def read_input(self, stack: ExitStack) -> bool:
        """Read the prompt; a tree that is opened has its own."""
        if self.options.open is not None:
            return True
        if not super().read_input(stack):
            return False
        rows = all_rows(self.input)
        if len(rows) != 1:
            raise UsageError(f"a tree has one prompt, and there are {len(rows)}", hint="--input-format text reads one")
        if isinstance(rows[0], BadRow):
            raise InputError(rows[0].message)
        self.row, self.lone = rows[0], True
        return True

    def open(self, stack: ExitStack) -> None:
        """Open the output, and the file of a new tree."""
        options = self.options
        if options.save is not None:
            self.saved = open_beside(Path(options.save))
            stack.callback(self.saved.abandon, keep=False)
        self.shown = self.live = options.on_screen
        sink = None if self.shown else self.sink(stack, options.output)
        self.results = TreeOutput(options, sink, self._show)

    def load(self) -> None:
        """Load the checkpoint; make the tree, or open it."""
        options = self.options
        bar = LoadingBar(self.err, time.monotonic)
        needed = self.row is not None and self.row.prompt_ids is None
        on_event = None if options.quiet else bar.show
        with closing(bar):
            session: Any = self.load_engine(
                self.early, self.layers, on_event=on_event, need_tokenizer=needed, live=self.shown
            )
        self.explorer = self._explorer(session)
        self.explorer.interrupted = self.interrupt
        session.use_threads(session.plan(self.explorer.base).rows)
        self.messages.detail(*session.notes())

    def _explorer(self, session: Session) -> Explorer:
        """The tree of --open, or a new one."""
        from genctl.io.sessions import new_file
        from genctl.tree.explorer import Explorer

        if self.row is None:
            path = Path(self.options.open or "")
            return Explorer.reopen(session, path, memory=self.memory, note=self.messages.remark)
        layers = [*self.layers, *([row_layer(self.row.params, self.row.where)] if self.row.params else [])]
        resolved, plan = self.settle(session, layers, self.options.strategy)
        self.describe(resolved, plan)
        prompt = session.planner.read(request_of(self.row, resolved, 0))
        self.messages.note_once(prompt.note)
        file: Path | Sink | None = self.saved
        if file is None and self.options.has_screen:  # what a person does by hand is always saved
            file = new_file("explore", prompt.shown or prompt.text)
        seed = start_seed(resolved)
        return Explorer.begin(
            session, prompt.text, prompt.ids, layers, seed=seed, path=file, memory=self.memory, shown=prompt.shown
        )

    def deliver(self, stack: ExitStack) -> None:
        """Do the commands, and write what they give; or show the screen."""
        stack.push(lambda kind, *_: self.explorer.close() if kind is None else self.explorer.leave())
        self.interrupt.gentle = True
        if self.options.has_screen:
            from genctl.commands.explore.screen import run_screen

            run_screen(self.explorer, coloured=not self.out.no_color, signalled=lambda: self.interrupt.status)
            return
        for call in self.calls:
            if self.interrupt.status:
                break
            try:
                for result in self.explorer.do(call):
                    with self.interrupt.busy():
                        self.results.put(result)
            except GenctlError as error:
                if self.options.script is not None:
                    error.message = f"{call.line}: {error.message}"
                raise
        self._finish()

    def _show(self, line: str) -> None:
        """Print a line on the terminal."""
        from rich.text import Text

        self.hide()
        self.out.print(Text(line))

    def _finish(self) -> None:
        """Complete the output and the page; say what an expansion came to, and where the tree is."""
        if self.page is not None:
            from genctl.tree.as_events import events_of

            for event in events_of(self.explorer.tree):
                self.page.feed(event)
        self.results.close()
        if self.results.expanding and self.results.covered is not None:
            self.messages.note(formats.covered_line(self.results.covered))
        if self.explorer.file is not None:
            path = self.explorer.file.path
            self.messages.note(f"the tree is in {path}: --open continues it, genctl report makes a page of it")

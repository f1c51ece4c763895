"""`genctl explore`: a tree is made or opened, and expanded, done by a script, or shown on a screen."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from genctl.commands.explore import formats
from genctl.commands.explore.options import ExploreOptions, check_opened, check_screen, expansion
from genctl.commands.job import Job, Row, request_of, settle, start_seed, started
from genctl.commands.options import memory_bytes
from genctl.config import reader
from genctl.config.layers import Layer, row_layer
from genctl.config.reader import Unreadable
from genctl.errors import GenctlError, InputError, UsageError
from genctl.io import writers
from genctl.io.output import open_beside
from genctl.io.readers import all_rows
from genctl.io.rows import BadRow, InputRow
from genctl.io.sink import Sink
from genctl.terminal.console import make_consoles
from genctl.terminal.progress_bars import LoadingBar
from genctl.tree.commands import MEMORY, Call, parse_script
from genctl.tree.results import Continuation, Covered, Result

if TYPE_CHECKING:
    from genctl.engines.session import Session
    from genctl.tree.explorer import Explorer


LONGEST_SCRIPT = 1 << 20  # bytes


def explore(options: ExploreOptions) -> int | None:
    """`genctl explore`."""
    with started(options) as job:
        out, err = make_consoles(options.color)
        check_screen(options)
        memory = MEMORY if options.memory is None else memory_bytes(options.memory)
        calls = _script(options)
        if (limits := expansion(options)) is not None:
            calls = [Call("expand", limits, f"expand {options.expand}")]
        if options.open is not None:
            check_opened(options)
            job.options = options = _with_saved_model(options, Path(options.open))
        layers, early = job.early_settings()
        if early.runtime.backend is not None:
            raise UsageError(
                f"backend = {early.runtime.backend} ({early.origins['backend']}): a tree needs the distribution "
                "over all token ids, and a server gives a few",
                hint="genctl chat talks to servers",
            )
        prompt: InputRow | None = None  # a tree that is opened has its own
        if options.open is None:
            rows = job.read()
            if rows is None:
                return None
            prompt = _only_prompt(all_rows(rows))
            job.single_prompt = True

        with job.outputs() as stack:
            saved: Sink | None = None  # the file of --save, until it is the tree's
            if options.save is not None:
                saved = open_beside(Path(options.save))
                stack.callback(saved.abandon, keep=False)
            job.live = options.on_screen
            sink = None if options.on_screen else job.sink(stack, options.output)
            results = TreeOutput(options, sink, lambda line: out.print(Text(line)))

            with closing(LoadingBar(err, time.monotonic)) as bar:
                on_event = None if options.quiet else bar.show
                needed = prompt is not None and prompt.prompt_ids is None
                session: Any = job.load_engine(early, layers, on_event=on_event, need_tokenizer=needed, live=job.live)
            explorer = _explorer(job, options, session, layers, prompt, saved, memory)
            explorer.interrupted = job.interrupt
            session.use_threads(session.plan(explorer.base).rows)
            job.messages.detail(*session.notes())
            stack.push(lambda kind, *_: explorer.close() if kind is None else explorer.leave())

            job.interrupt.gentle = True
            if options.has_screen:
                from genctl.commands.explore.screen import run_screen

                run_screen(explorer, coloured=not out.no_color, signalled=lambda: job.interrupt.status)
            else:
                for call in calls:
                    if job.interrupt.status:
                        break
                    try:
                        for result in explorer.do(call):
                            with job.interrupt.busy():
                                results.put(result)
                    except GenctlError as error:
                        if options.script is not None:
                            error.message = f"{call.line}: {error.message}"
                        raise
                if job.page is not None:
                    from genctl.tree.as_events import events_of

                    for event in events_of(explorer.tree):
                        job.page.feed(event)
                results.close()
                if results.expanding and results.covered is not None:
                    job.messages.note(formats.covered_line(results.covered))
                if explorer.file is not None:
                    path = explorer.file.path
                    job.messages.note(f"the tree is in {path}: --open continues it, genctl report makes a page of it")
        return job.status()


def _script(options: ExploreOptions) -> list[Call]:
    """The commands of --script. Raises UsageError with all that cannot be read, InputError."""
    name = options.script
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


def _with_saved_model(options: ExploreOptions, path: Path) -> ExploreOptions:
    """The options with the checkpoint that the tree was made with, if no flag names another place of it.

    Nothing is downloaded because a file names it.
    """
    from genctl.tree.saved import read_tree

    values = {"model": read_tree(path).opened.model, "offline": True}
    if any("model" in layer.values or "offline" in layer.values for layer in options.flags):
        del values["offline"]
    layer = Layer("saved", values, dict.fromkeys(values, f"--open {path}"), "user")
    return replace(options, flags=[layer, *options.flags])


def _only_prompt(rows: Sequence[Row]) -> InputRow:
    """The prompt of a tree. Raises UsageError for several, InputError for a bad row."""
    if len(rows) != 1:
        raise UsageError(f"a tree has one prompt, and there are {len(rows)}", hint="--input-format text reads one")
    if isinstance(row := rows[0], BadRow):
        raise InputError(row.message)
    return row


def _explorer(
    job: Job,
    options: ExploreOptions,
    session: Session,
    layers: Sequence[Layer],
    row: InputRow | None,
    saved: Sink | None,
    memory: int,
) -> Explorer:
    """The tree of --open, or a new one."""
    from genctl.io.sessions import new_file
    from genctl.tree.explorer import Explorer

    if row is None:
        return Explorer.reopen(session, Path(options.open or ""), memory=memory, note=job.messages.remark)
    layers = [*layers, *([row_layer(row.params, row.where)] if row.params else [])]
    resolved, plan = settle(session, layers, options.strategy)
    job.describe(resolved, plan)
    prompt = session.planner.read(request_of(row, resolved, 0))
    job.messages.note_once(prompt.note)
    file: Path | Sink | None = saved
    if file is None and options.has_screen:  # what a person does by hand is always saved
        file = new_file("explore", prompt.shown or prompt.text)
    seed = start_seed(resolved)
    return Explorer.begin(
        session, prompt.text, prompt.ids, layers, seed=seed, path=file, memory=memory, shown=prompt.shown
    )


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
            self._writer.write(formats.record(result, next(self._rows) if self.expanding else None))
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

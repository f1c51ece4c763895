"""`genctl explore`: create or open a tree; then expand it, run a script on it, or show it on a screen."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from genctl.commands.explore import formats
from genctl.commands.explore.options import ExploreOptions, check_opened, check_screen, expansion
from genctl.commands.job import Job, request_of, settle, start_seed, started
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
from genctl.terminal.live_region import LoadingBar
from genctl.tree.commands import Call, Continuation, Covered, Result, parse_script
from genctl.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from genctl.engines.session import Session
    from genctl.tree.explorer import Explorer


LONGEST_SCRIPT = 1 << 20  # bytes


def explore(options: ExploreOptions) -> int | None:
    """`genctl explore`."""
    with started(options) as job:
        out, err = make_consoles(options.color)
        check_screen(options)
        calls = _script(options)
        if (limits := expansion(options)) is not None:
            calls = [Call("expand", limits, f"expand {options.expand}")]
        begins: TokenTree | InputRow
        file: Sink | None = None  # of the tree
        if options.open is not None:
            from genctl.tree.saved import reopen

            check_opened(options)
            begins, file = reopen(Path(options.open), job.messages.remark)
            job.stack.callback(file.leave)
            job.options = options = _with_saved_model(options, begins.opened.model)
        layers, early = job.early_settings()
        if early.runtime.backend is not None:
            raise UsageError(
                f"backend = {early.runtime.backend} ({early.origins['backend']}): a tree needs the distribution "
                "over all token ids, and a server gives a few",
                hint="genctl chat talks to servers",
            )
        if options.open is None:
            source = job.read()
            if source is None:
                return None
            rows = all_rows(source)
            if len(rows) != 1:
                words = f"a tree has one prompt, and there are {len(rows)}"
                raise UsageError(words, hint="--input-format text reads one")
            if isinstance(row := rows[0], BadRow):
                raise InputError(row.message)
            begins, job.single_prompt = row, True

        with job.outputs() as stack:
            if options.save is not None:
                file = open_beside(Path(options.save))
                stack.callback(file.abandon, keep=False)
            job.live = options.on_screen
            sink = None if options.on_screen else job.sink(stack, options.output)
            put, close = _output(options, sink, out)

            with closing(LoadingBar(err, time.monotonic)) as bar:
                on_event = None if options.quiet else bar.show
                needed = isinstance(begins, InputRow) and begins.prompt_ids is None
                session: Any = job.load_engine(early, layers, on_event=on_event, need_tokenizer=needed, live=job.live)
            explorer = _explorer(job, options, session, layers, begins, file)
            explorer.interrupted = job.interrupt
            session.use_threads(session.plan(explorer.base).rows)
            job.messages.detail(*session.notes())
            stack.push(lambda kind, *_: explorer.close(sync=kind is None))

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
                                if options.expand is None or isinstance(result, Continuation):
                                    put(result)
                                elif isinstance(result, Covered):
                                    job.messages.note(formats.covered_line(result))
                    except GenctlError as error:
                        if options.script is not None:
                            error.message = f"{call.line}: {error.message}"
                        raise
                if job.page is not None:
                    from genctl.tree.saved import events_of

                    for event in events_of(explorer.tree):
                        job.page.feed(event)
                close()
                if explorer.file is not None:
                    path = explorer.file.path
                    job.messages.note(f"the tree is in {path}: --open continues it, genctl report makes a page of it")
        return job.status()


def _script(options: ExploreOptions) -> list[Call]:
    """The commands of --script. Raises UsageError that lists all invalid lines, InputError if it cannot be read."""
    if options.script is None:
        return []
    is_piped = options.script == "-"
    if is_piped and (options.input == "-" or not (options.input or options.arguments or options.open)):
        raise UsageError("--script - reads commands from standard input: give the prompt as an argument")
    if is_piped and sys.stdin is None:
        raise InputError("cannot read standard input: it is closed")
    name = "standard input" if is_piped else options.script
    try:
        lines = reader.text_lines(reader.text(sys.stdin.buffer if is_piped else name, LONGEST_SCRIPT))
    except Unreadable as error:
        raise InputError(f"cannot read {'' if is_piped else '--script '}{name}: {error}") from None
    return parse_script(lines, name)


def _with_saved_model(options: ExploreOptions, model: str) -> ExploreOptions:
    """The options, with the tree's own checkpoint unless a flag names another location of it.

    A model that only the file names is not downloaded unless a flag allows it.
    """
    values = {"model": model, "offline": True}
    if any("model" in layer.values or "offline" in layer.values for layer in options.flags):
        del values["offline"]
    layer = Layer("saved", values, dict.fromkeys(values, f"--open {options.open}"), "user")
    return replace(options, flags=[layer, *options.flags])


def _explorer(
    job: Job,
    options: ExploreOptions,
    session: Session,
    layers: Sequence[Layer],
    begins: TokenTree | InputRow,
    file: Sink | None,
) -> Explorer:
    """The tree of --open, or a new one. A tree on the screen is always saved to a file."""
    from genctl.io.sessions import new_file
    from genctl.tree.explorer import Explorer

    if isinstance(begins, TokenTree):
        return Explorer(session, begins, file)
    row = begins
    layers = [*layers, *([row_layer(row.params, row.where)] if row.params else [])]
    resolved, plan = settle(session, layers, options.strategy)
    job.describe(resolved, plan)
    prompt = session.planner.read(request_of(row, resolved, 0))
    job.messages.note_once(prompt.note)
    seed = start_seed(resolved)
    explorer = Explorer.begin(session, prompt.text, prompt.ids, layers, seed=seed, shown=prompt.shown)
    if file is None and options.has_screen:
        file = open_beside(new_file("explore", prompt.shown or prompt.text))
    if file is not None:
        explorer.save(file)
    return explorer


def _output(
    options: ExploreOptions, sink: writers.Sink | None, out: Console
) -> tuple[Callable[[Result], object], Callable[[], object]]:
    """Two functions: one writes a result (as a record in a format, or as lines of text), one closes the output."""
    expanding, rows = options.expand is not None, itertools.count()

    def put_lines(result: Result) -> None:
        for line in formats.lines_of(result, tabs=expanding and sink is not None):
            if sink is None:
                out.print(Text(line))
            else:
                sink.write(f"{line}\n".encode("utf-8", "backslashreplace"))

    if sink is None or options.format == "text":
        return put_lines, lambda: None if sink is None else sink.close()
    writer: writers.Writer = writers.TsvWriter(sink, formats.COLUMNS)
    if options.format != "tsv":
        writer = writers.open_writer(options.format, sink, on_error=lambda record: None)
    return lambda result: writer.write(formats.record(result, next(rows) if expanding else None)), writer.close

"""`genctl explore`: a tree is made or opened, and expanded, done by a script, or shown on a screen."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
            source = job.read()
            if source is None:
                return None
            rows = all_rows(source)
            if len(rows) != 1:
                words = f"a tree has one prompt, and there are {len(rows)}"
                raise UsageError(words, hint="--input-format text reads one")
            if isinstance(row := rows[0], BadRow):
                raise InputError(row.message)
            prompt, job.single_prompt = row, True

        with job.outputs() as stack:
            saved: Sink | None = None  # the file of --save, until it is the tree's
            if options.save is not None:
                saved = open_beside(Path(options.save))
                stack.callback(saved.abandon, keep=False)
            job.live = options.on_screen
            sink = None if options.on_screen else job.sink(stack, options.output)
            output = _output(options, sink, out)
            covered: Covered | None = None  # what --expand came to

            with closing(LoadingBar(err, time.monotonic)) as bar:
                on_event = None if options.quiet else bar.show
                needed = prompt is not None and prompt.prompt_ids is None
                session: Any = job.load_engine(early, layers, on_event=on_event, need_tokenizer=needed, live=job.live)
            explorer = _explorer(job, options, session, layers, prompt, saved)
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
                                    output.put(result)
                                covered = result if isinstance(result, Covered) else covered
                    except GenctlError as error:
                        if options.script is not None:
                            error.message = f"{call.line}: {error.message}"
                        raise
                if job.page is not None:
                    from genctl.tree.saved import events_of

                    for event in events_of(explorer.tree):
                        job.page.feed(event)
                output.close()
                if options.expand is not None and covered is not None:
                    job.messages.note(formats.covered_line(covered))
                if explorer.file is not None:
                    path = explorer.file.path
                    job.messages.note(f"the tree is in {path}: --open continues it, genctl report makes a page of it")
        return job.status()


def _script(options: ExploreOptions) -> list[Call]:
    """The commands of --script. Raises UsageError with all that cannot be read, InputError."""
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


def _explorer(
    job: Job,
    options: ExploreOptions,
    session: Session,
    layers: Sequence[Layer],
    row: InputRow | None,
    saved: Sink | None,
) -> Explorer:
    """The tree of --open, or a new one."""
    from genctl.io.sessions import new_file
    from genctl.tree.explorer import Explorer

    if row is None:
        return Explorer.reopen(session, Path(options.open or ""), note=job.messages.remark)
    layers = [*layers, *([row_layer(row.params, row.where)] if row.params else [])]
    resolved, plan = settle(session, layers, options.strategy)
    job.describe(resolved, plan)
    prompt = session.planner.read(request_of(row, resolved, 0))
    job.messages.note_once(prompt.note)
    # what a person does by hand is always saved
    file = new_file("explore", prompt.shown or prompt.text) if saved is None and options.has_screen else saved
    seed = start_seed(resolved)
    return Explorer.begin(session, prompt.text, prompt.ids, layers, seed=seed, path=file, shown=prompt.shown)


class TreeOutput(NamedTuple):
    """Where results go as they come."""

    put: Callable[[Result], object]
    close: Callable[[], object]


def _output(options: ExploreOptions, sink: writers.Sink | None, out: Console) -> TreeOutput:
    """Rows of --expand, or what the commands of a script come to: in a format, or lines for people on a terminal."""
    expanding, rows = options.expand is not None, itertools.count()

    def put(result: Result) -> None:
        for line in formats.lines_of(result, tabs=expanding and sink is not None):
            if sink is None:
                out.print(Text(line))
            else:
                sink.write(f"{line}\n".encode("utf-8", "backslashreplace"))

    if sink is None or options.format == "text":
        return TreeOutput(put, lambda: None if sink is None else sink.close())
    writer: writers.Writer = writers.TsvWriter(sink, formats.COLUMNS)
    if options.format != "tsv":
        writer = writers.open_writer(options.format, sink, on_error=lambda record: None)
    return TreeOutput(
        lambda result: writer.write(formats.record(result, next(rows) if expanding else None)), writer.close
    )

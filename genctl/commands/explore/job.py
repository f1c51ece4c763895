"""`genctl explore` at work: a tree is made or opened, and expanded, done by a script, or shown on a screen."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.commands.engine_choice import LOCAL, EngineChoice
from genctl.commands.explore import formats
from genctl.commands.explore.options import (
    ExploreOptions,
    check_opened,
    check_screen,
    expansion,
    memory,
    sides_of,
    told_apart,
)
from genctl.commands.job import Job, request_of, start_seed
from genctl.config.layers import Layer, Resolved, resolve, row_layer, values_of
from genctl.config.sides import LOADING, Side
from genctl.documents import reader
from genctl.documents.reader import Unreadable
from genctl.errors import GenctlError, InputError, UsageError
from genctl.io import writers
from genctl.io.output import open_beside
from genctl.io.readers import all_rows
from genctl.io.rows import BadRow, InputRow
from genctl.io.sink import Sink
from genctl.params import Generation, knobs
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.progress_bars import LoadingBar
from genctl.tree.altering import preset_values
from genctl.tree.file_settings import FileSettings, flag_for, found_of
from genctl.tree.language import Call, parse_script
from genctl.tree.results import Continuation, Covered, Result

if TYPE_CHECKING:
    from genctl.engines.session import Session
    from genctl.tree.beside import Second
    from genctl.tree.explorer import Explorer


# -- where the results of a tree's commands go: records, lines for people, or the tree itself at the end ---------------


class TreeOutput:
    """Writes results as they come, to a sink in a format, or with `show` on a terminal, a line at a time.

    `expanding`: the results are those of --expand, whose continuations are rows.
    """

    def __init__(
        self, format: str, sink: writers.Sink | None, show: Callable[[str], object], *, expanding: bool
    ) -> None:
        self.format, self.expanding = format, expanding
        self.covered: Covered | None = None  # what the newest expansion came to
        self._sink, self._show = sink, show
        self._rows = 0
        self._writer: writers.Writer | None = None
        if sink is not None and format == "tsv":
            self._writer = writers.TsvWriter(sink, formats.COLUMNS)
        elif sink is not None and format in ("json", "jsonl"):
            self._writer = writers.open_writer(format, sink, on_error=lambda record: None)

    def put(self, result: Result) -> None:
        """Write or show one result. Raises OutputError."""
        if isinstance(result, Covered):
            self.covered = result
        if self.expanding and not isinstance(result, Continuation):
            return
        if self._writer is not None:
            self._writer.write(self._record(result))
        elif isinstance(result, Continuation) and self.expanding:
            self._lines([formats.continuation_line(result, tabs=self._sink is not None)])
        else:
            self._lines(list(formats.lines_of(result)))

    def close(self) -> None:
        """Complete the output."""
        if self._writer is not None:
            self._writer.close()
        elif self._sink is not None:
            self._sink.close()

    def _record(self, result: Result) -> dict[str, object]:
        if self.expanding and isinstance(result, Continuation):
            self._rows += 1
            return formats.continuation_record(self._rows - 1, result)
        return formats.result_record(result)

    def _lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            if self._sink is None:
                self._show(line)
            else:
                self._sink.write(f"{line}\n".encode("utf-8", "backslashreplace"))


LONGEST_SCRIPT = 1 << 20  # bytes


def _how(key: str, value: Any) -> str:
    """How a setting of a tree is set: by a command, if it decides which tokens are written."""
    return f"the command set {key}=VALUE sets it" if key in knobs(Generation) else flag_for(key, value)


class ExploreJob(Job[ExploreOptions]):
    """One run of `genctl explore`."""

    def __init__(self, options: ExploreOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        super().__init__(options, interrupt, choice)
        self.open_consoles()
        self.row: InputRow | None = None  # the prompt; None for a tree that is opened
        self.second: Session | None = None  # of --models or --beside
        self.saved: Sink | None = None  # the file of --save, until it is the tree's
        self.beside: Side | None = None  # what is shown beside the tree
        self.other: dict[str, Any] | None = None  # its settings, if they are not the tree's
        self.file: FileSettings | None = None  # which settings of a tree that is opened hold

    def prepare(self) -> int | None:
        """Settings without those of the checkpoint, and the commands."""
        check_screen(self.options)
        first, self.beside = sides_of(self.options)
        if first is not None:
            layer = Layer("flag", first.settings, dict.fromkeys(first.settings, "--models"), "command")
            self.options = replace(self.options, flags=[*self.options.flags, layer])
        if self.beside is not None:
            self.other = self._other_settings(self.beside)
        self.memory = memory(self.options)
        self.calls = self._script()
        limits = expansion(self.options)
        if limits is not None:
            self.calls = [Call("expand", limits, f"expand {self.options.expand}")]
        if self.options.open is not None:
            check_opened(self.options)
            self._take_saved_model(Path(self.options.open))
        status = super().prepare()
        if self.beside is not None:
            beneath = [] if self.beside.presets else self.layers
            _ = replace(self.beside, layers=(*beneath, *self.beside.own())).early
        return status

    def _other_settings(self, side: Side) -> dict[str, Any] | None:
        """The settings of a side with which its distributions are computed; None: those of the tree."""
        values = {key: value for name in side.presets for key, value in preset_values(name).items()}
        values |= {key: value for key, value in side.settings.items() if key not in LOADING}
        return values if values or side.kind != "checkpoint" else None

    def _script(self) -> list[Call]:
        """The commands of --script. Raises UsageError with all that cannot be read, InputError."""
        name, options = self.options.script, self.options
        if name is None:
            return []
        if name != "-":
            try:
                return parse_script(reader.text_lines(reader.text(name, LONGEST_SCRIPT)), name)
            except Unreadable as error:
                raise InputError(f"cannot read --script {name}: {error}") from None
        if options.input == "-" or (options.input is None and not options.arguments and options.open is None):
            raise UsageError("--script - reads commands from standard input: give the prompt as an argument")
        if sys.stdin is None:
            raise InputError("cannot read standard input: it is closed")
        try:
            return parse_script(reader.text_lines(reader.text(sys.stdin.buffer, LONGEST_SCRIPT)), "standard input")
        except Unreadable as error:
            raise InputError(f"cannot read standard input: {error}") from None

    def _take_saved_model(self, path: Path) -> None:
        """Load the checkpoint that the tree was made with, if no flag names another place of it."""
        from genctl.tree.journal import read_tree

        opened = read_tree(path).opened
        self.file = FileSettings("tree", found_of(path), values_of(self.options.layers()), how=_how)
        layer = Layer("saved", {"model": opened.model}, {"model": f"--open {path}"}, "user")
        self.options = replace(self.options, flags=[*self.file.layers(layer), *self.options.flags])

    def check_early(self, resolved: Resolved) -> None:
        """Raises UsageError for settings that cannot be used together with a tree."""
        super().check_early(resolved)
        if resolved.runtime.backend is not None:
            raise UsageError(
                f"backend = {resolved.runtime.backend} ({resolved.origins['backend']}): a tree needs the distribution "
                "over all token ids, and a server gives a few",
                hint="genctl chat talks to servers",
            )

    def read(self, stack: ExitStack) -> bool:
        """Read the prompt; a tree that is opened has its own."""
        if self.options.open is not None:
            return True
        if not super().read(stack):
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
        sink = None
        if not self.shown:
            sink = self.sink(stack, options.output)
        self.results = TreeOutput(options.format, sink, self._show, expanding=options.expand is not None)

    def load(self) -> None:
        """Load the checkpoint; make the tree, or open it."""
        options = self.options
        bar = LoadingBar(self.err, time.monotonic)
        needed = self.row is not None and self.row.prompt_ids is None
        on_event = None if options.quiet else bar.show
        loading = partial(self.load_engine, on_event=on_event, need_tokenizer=needed, live=self.shown)
        with closing(bar):
            side = self.beside
            if side is not None and any(key in LOADING for key in side.settings):
                layers = (*self.layers, *side.own(*knobs(Generation)))
                second: Any = loading(resolve(layers, tentative=True))
                self.second, self.loaded = second, None  # both stay loaded
            session: Any = loading(self.early, self.layers)
        self.explorer = self._begin(session) if self.row is not None else self._reopen(session)
        self.explorer.interrupted = self.interrupt
        session.use_threads(session.plan(self.explorer.space.base).rows)
        self.messages.detail(*session.notes())

    def _reopen(self, session: Session) -> Explorer:
        from genctl.tree.explorer import Explorer

        explorer = Explorer.reopen(session, Path(self.options.open or ""), memory=self.memory, file=self.file)
        with suppress(GenctlError):  # what cannot be used is an error of the command that uses it
            explorer.space.resolved()
        self._tell()
        return explorer

    def _tell(self) -> None:
        """Say which settings of the tree that is opened do not hold, once."""
        for line in () if self.file is None else self.file.news():
            self.messages.remark(line)

    def _begin(self, session: Session) -> Explorer:
        from genctl.tree.explorer import Explorer

        assert self.row is not None
        layers = [*self.layers, *([row_layer(self.row.params, self.row.where)] if self.row.params else [])]
        resolved, plan = self.settle(session, layers, self.options.strategy)
        self.describe(resolved, plan)
        prompt = session.planner.read(request_of(self.row, resolved, 0))
        self.messages.note_once(prompt.note)
        return Explorer.begin(
            session,
            prompt.text,
            prompt.ids,
            layers,
            seed=start_seed(resolved),
            path=self._new_path(prompt.shown or prompt.text),
            memory=self.memory,
            shown=prompt.shown,
        )

    def _new_path(self, prompt: str) -> Path | Sink | None:
        """Where a new tree is saved: what a person does by hand always is."""
        from genctl.tree.journal import new_file

        if self.saved is not None:
            return self.saved
        return new_file("explore", prompt) if self.options.has_screen else None

    def deliver(self, stack: ExitStack) -> None:
        """Do the commands, and write what they give; or show the screen."""
        stack.push(lambda kind, *_: self.explorer.close() if kind is None else self.explorer.leave())
        self.interrupt.gentle = True
        if self.second is not None:
            stack.callback(self.second.close)
        second: Second | None = None
        if self.beside is not None:
            from genctl.tree import beside

            second = beside.Second(self.explorer.space, session=self.second, knobs=self.other)
        if self.options.has_screen:
            self._show_screen(stack, second)
            return
        self.explorer.second = second
        for result in self.explorer.resume():
            self._put(result)
        self._tell()
        for call in self.calls:
            if self.interrupt.status:
                break
            try:
                for result in self.explorer.do(call):
                    self._put(result)
                self._tell()
            except GenctlError as error:
                if self.options.script is not None:
                    error.message = f"{call.line}: {error.message}"
                raise
        self._finish()

    def _show_screen(self, stack: ExitStack, second: Second | None) -> None:
        from genctl.commands.explore.screen_app import run_screen
        from genctl.commands.explore.screen_source import TreeSource

        names = None
        if self.beside is not None:
            is_model = self.beside.kind == "checkpoint"
            mine = self.early.runtime.model if is_model else "the tree's settings"
            names = told_apart((mine, self.beside.name)) if is_model else (mine, self.beside.name)
        source = TreeSource(self.explorer, second, names)
        journal = self.explorer.space.journal
        assert journal is not None
        unfinished = bool(journal.unfinished)
        if unfinished:
            source.resume()
        run_screen(
            source,
            saved=str(journal.path),
            coloured=not self.out.no_color,
            signalled=lambda: self.interrupt.status,
            resume=unfinished,
        )

    def _put(self, result: Result) -> None:
        with self.interrupt.busy():
            self.results.put(result)

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
        if self.options.save is not None:
            self.messages.note(
                f"the tree is in {self.options.save}: --open continues it, genctl report makes a page of it"
            )

"""The part that commands share: one run of a command, from its settings to its exit status.

A command is a function in the `job.py` of its folder, to be read top to bottom. It gets a `Job` from `started`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from genctl.commands.engine_choice import LOCAL, EngineChoice, check_launch
from genctl.commands.messages import FailedRecord, Messages, Reuse
from genctl.commands.options import ModelOptions
from genctl.config.check import shown
from genctl.config.layers import Layer, Resolved, overlay, resolve, row_layer
from genctl.config.settings import unread_files
from genctl.engines.protocol import Engine, EngineSetup, JobPlan, Request, trained_length_note
from genctl.errors import Exit, GenctlError, UsageError, count
from genctl.events import Began, Event, Finished, Prefilled
from genctl.io import writers
from genctl.io.record_output import RecordOutput
from genctl.io.records import finite
from genctl.io.rows import BadRow, InputRow, random_seed, row_seed
from genctl.terminal import loading_line
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.standard_streams import is_terminal

if TYPE_CHECKING:
    from genctl.commands.recording import PageFile

WIDTH = 16  # prompts decoded at once without a live view
SPAN = 8  # rows of a group, as a multiple of the width; a group is decoded to its end before the next begins

Made = TypeVar("Made")
Row: TypeAlias = InputRow | BadRow
Listener = Callable[[Event], object]
SourceOf = Callable[[str], tuple[InputRow, Resolved]]  # the row of a lane, and the settings of its run


@contextmanager
def started(options: ModelOptions, choice: EngineChoice = LOCAL, *, row: str = "prompt") -> Iterator[Job]:
    """A job, with signals handled while it runs. `row` is the word for an input row in messages."""
    with Interrupt() as interrupt, ExitStack() as stack:
        if not options.verbose:
            stack.enter_context(_libraries_hushed())
        job = Job(options, interrupt, choice, stack, row)
        if not choice.follows:
            job.messages.note(*unread_files(options.config, getattr(options, "presets", ())))
        yield job


class Job:
    """One run of a command: its messages, its engine, its page, and the rows that failed."""

    def __init__(
        self, options: ModelOptions, interrupt: Interrupt, choice: EngineChoice, stack: ExitStack, row: str = "prompt"
    ) -> None:
        self.options, self.interrupt, self.choice = options, interrupt, choice
        self.stack, self._row = stack, row  # the stack closes the input at the end of the command
        self.loaded: Engine | None = None  # the current engine, to be closed
        self.listeners: list[Listener] = []  # each gets every event, in this order
        self.output: RecordOutput | None = None  # of records, one or more per row
        self.live = False  # results are shown while they are generated, and not written
        self.shown = False  # the view shows results in place of `output`
        self.view: Any = None  # the live view, if any; its `hide` clears it
        self.failed = 0  # number of failed rows
        self.single_prompt = False  # whether there is only one prompt, which messages need not name
        self.messages = Messages(quiet=options.quiet, verbose=options.verbose, color=options.color, hide=self.hide)
        self.load_s = 0.0
        self.page: PageFile | None = None  # of --report
        self.reuse = Reuse(None)
        interrupt.hide = self.hide

    # -- settings, input, outputs --------------------------------------------------------------------------------------

    def early_settings(self) -> tuple[list[Layer], Resolved]:
        """The layers, and the settings without the checkpoint's. Raises UsageError, PresetError, InputError."""
        layers = self.options.layers()
        early = resolve(layers, tentative=True)
        check_early(early, shares=self.choice.ranks)
        self.choice.check(self.options, early)
        return layers, early

    def read(self, **how: Any) -> Iterator[Row] | None:
        """The rows of the input; None if there is none. `how` goes to `readers.open_prompts`."""
        rows = self.options.prompts(self.messages.print, **how)
        if rows is None:
            return None
        self.single_prompt = rows.is_alone()
        return iter(self.stack.enter_context(rows))

    @property
    def waits(self) -> bool:
        """Whether rows come from a pipe or a keyboard, so the next one may take long."""
        return not self.options.arguments and self.options.input in (None, "-")

    @contextmanager
    def outputs(self) -> Iterator[ExitStack]:
        """A stack for everything that is opened. It closes in reverse order: outputs, then the engine, then the page.

        Opens the page of --report, which listens to all events.
        """
        options = self.options
        with ExitStack() as stack:
            if options.report is not None:
                from genctl.commands.recording import PageFile

                self.page = page = stack.enter_context(PageFile(options.report, force=options.force))
                self.listeners.append(page.feed)
            stack.push(lambda kind, *_: self.close_engine(failed=kind is not None))
            yield stack
        self.messages.close()

    def open_event_log(self, stack: ExitStack, path: str | None) -> None:
        """Add the listener that writes --events."""
        if path is not None:
            from genctl.commands.recording import event_writer

            self.listeners.append(event_writer(stack, path, force=self.options.force))

    def sink(self, stack: ExitStack, path: str | None, *, at_once: bool = False) -> writers.Sink:
        """The output for results; abandoned on an error, so that no old file is lost. `at_once`: see `open_output`."""
        stdout = None if at_once else sys.stdout
        sink = writers.open_output(path, stdout, force=self.options.force, at_once=at_once)
        stack.callback(sink.abandon)
        return sink

    def report_sink(self, stack: ExitStack) -> writers.Sink | None:
        """The output for findings; None: they are printed as text."""
        options = self.options
        return self.sink(stack, options.output) if options.format != "text" or options.to_file else None

    def hide(self) -> None:
        """Clear moving output from the terminal."""
        if self.view is not None:
            self.view.hide()

    def row_label(self, row: Row, *more: str) -> str:
        """The subject of a message, with its colon: `prompt 2, run a: `; "" for a single prompt."""
        words = [*([] if self.single_prompt else [f"{self._row} {row.name}"]), *more]
        return f"{', '.join(words)}: " if words else ""

    # -- the engine ----------------------------------------------------------------------------------------------------

    def setup(
        self, resolved: Resolved, layers: Sequence[Layer], *, need_tokenizer: bool | None = None, **how: Any
    ) -> EngineSetup:
        """The setup for loading an engine. `layers` are checked before weights are read; `how` has more fields."""
        return EngineSetup(
            resolved.runtime,
            tuple(layers),
            self.options.are_texts if need_tokenizer is None else need_tokenizer,
            allow_plugins=self.options.allows("allow_plugins"),
            named=resolved.names_model,
            on_plan=self._planned_prompt,
            note=self.messages.note,
            remark=self.messages.remark,
            interrupted=self.interrupt,
            **{**self.options.trust, **how},
        )

    def load_engine(
        self, resolved: Resolved, layers: Sequence[Layer] = (), *, choice: EngineChoice | None = None, **how: Any
    ) -> Engine:
        """Close the current engine, and load the checkpoint or servers of these settings. `how`: see `setup`."""
        began = time.perf_counter()
        self.close_engine()
        engine = self.loaded = (choice or self.choice).load(self.setup(resolved, layers, **how))
        self.load_s += time.perf_counter() - began
        if self.page is not None:
            self.page.loaded(engine)
        loading_line.clear()
        self.hide()
        self.reuse = Reuse(engine.about.prompt_cache)
        return engine

    def _planned_prompt(self, tokens: int) -> None:
        """Show the length of the prompt that is prefilled next, if it is the only one and the view is live."""
        if self.live and self.single_prompt:
            loading_line.status(f"reading {count(tokens, 'token')}", restart=False)

    def close_engine(self, *, failed: bool = False) -> None:
        """Close the engine, if one is loaded."""
        if self.loaded is not None:
            hurried = bool(self.interrupt.status)
            self.loaded.close(hurried=hurried, failed=failed and not hurried)
        self.loaded = None

    def describe(self, resolved: Resolved, plan: JobPlan, prefix: str = "") -> None:
        """Print notes on the settings and on the engine's plan."""
        self.messages.detail(*(f"{prefix}{line}" for line in resolved.notes))
        self.messages.note(*(f"{prefix}{line}" for line in (*resolved.notices, *plan.remarks)))
        if not is_terminal(sys.stdout):
            self.messages.note_once(resolved.sampling_note, prefix)

    # -- rows and events -----------------------------------------------------------------------------------------------

    def fail(self, row: Row, code: str, message: str, *, already_shown: bool = False, hint: str = "") -> None:
        """Count a failed row, print why if `output` does not show it (unless `already_shown`), and write its record."""
        self.failed += 1
        if self.page is not None:
            self.page.failed(row.id, code, message)
        record = FailedRecord(row, code, message, subject=self.row_label(row), hint=hint)
        with self.interrupt.busy():
            if (self.output is None or self.shown) and not already_shown:
                self.messages.failure(record)
            if self.output is not None:
                self.output.put(row.index, [record])

    def listen(self, stream: Generator[Event, None, None], listeners: Sequence[Listener], source_of: SourceOf) -> None:
        """Pass each event to all listeners, in order."""
        with closing(stream):
            for event in stream:
                if isinstance(event, Began) and (columns := source_of(event.lane)[0].columns):
                    event = replace(event, input=finite(columns))
                with self.interrupt.busy():
                    for listener in listeners:
                        listener(event)

    def prompt_notes(self, source_of: SourceOf) -> Listener:
        """A listener that reports which prompts were shortened, once for all runs of a prompt, and other notes."""
        scaled: dict[str, Began] = {}  # lanes with texts that may exceed the training length

        def note(event: Event) -> None:
            if isinstance(event, Finished) and (began := scaled.pop(event.lane, None)) is not None:
                trained = began.settings["trained"]
                before = 0 if began.encoder_decoder else event.prompt_tokens
                if any(before + one.length > trained for one in event.hypotheses):
                    self.messages.note_once(trained_length_note(trained), self.row_label(source_of(event.lane)[0]))
            if not isinstance(event, Began):
                return
            if "trained" in event.settings:
                scaled[event.lane] = event
            row, resolved = source_of(event.lane)
            self.messages.note_once(event.settings.get("note", ""), self.row_label(row))
            if taken := event.settings.get("truncated", 0):
                were = count(taken, "token was", "tokens were")
                side = row.params.get("truncate", resolved.runtime.truncate)
                self.messages.remark_once(f"{self.row_label(row)}{were} taken from the prompt (--truncate {side})")

        return note

    # -- the end -------------------------------------------------------------------------------------------------------

    def rescue(self, stack: ExitStack) -> None:
        """Close the outputs if the model does not return after a signal; called in the thread that noticed."""
        stack.close()
        self.messages.close()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()

    def status(self) -> int:
        """The exit status."""
        return self.interrupt.status or int(Exit.ROWS_FAILED if self.failed else Exit.DONE)


@contextmanager
def _libraries_hushed() -> Iterator[None]:
    """Keep log records and warnings of libraries off the terminal; genctl reports what a user has to know."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# -- settings ----------------------------------------------------------------------------------------------------------


def check_early(early: Resolved, *, shares: bool = False) -> None:
    """Raises UsageError for settings that do not fit this launch, or that the file with them may not set.

    `shares`: the command can share its work with other processes.
    """
    check_key(early)
    if early.runtime.tensor_parallel or "WORLD_SIZE" in os.environ:  # each process would do the whole job
        check_launch(early.runtime, shares=shares)


def check_key(resolved: Resolved) -> None:
    """Raises UsageError if a file that is not the user's own chooses a server that would be sent a key."""
    setting = resolved.settings.get("backend")
    if setting is None or not setting.foreign or setting.value is None:
        return
    from genctl.engines.server.client import key_of, read

    if any(key_of(address)[0] for address in read(setting.value)):
        raise UsageError(
            f"{setting.place}: backend = {shown(setting.value)}: this server would be sent your API key, and a file "
            "outside your own folder cannot choose it",
            hint="name it with --backend, GENCTL_BACKEND or in your own config.toml",
        )


def settle(engine: Engine, layers: Sequence[Layer], strategy_name: str | None = None) -> tuple[Resolved, JobPlan]:
    """The settings with the checkpoint's beneath them, and the plan. Raises if the checkpoint cannot do the job."""
    resolved = engine.resolve(layers)
    plan = engine.plan(resolved)
    if strategy_name is not None:
        from genctl.config import modes

        modes.check(strategy_name, plan.strategy)
    return resolved, plan


# -- rows and their requests -------------------------------------------------------------------------------------------


def settings_of(row: InputRow, base: Resolved) -> Resolved:
    """The settings of one row: `base`, overridden by the row's own. Raises PresetError or InputError."""
    own = {**row.params, **{key: value for key, value in row.extra.items() if key != "reference"}}
    return overlay(base, row_layer(own, row.where)) if own else base


def usable(
    rows: Iterable[Row], make: Callable[[InputRow], Made], fail: Callable[[Row, str, str], object]
) -> Iterator[tuple[InputRow, Made]]:
    """Each row with the result of `make`. Bad rows, and those for which it raises GenctlError, go to `fail`."""
    for row in rows:
        if isinstance(row, BadRow):
            fail(row, row.code, row.message)
            continue
        try:
            made = make(row)
        except GenctlError as error:
            fail(row, error.code, error.message)
        else:
            yield row, made


def start_seed(*resolved: Resolved) -> int:
    """The seed of a run: the first that is set, else a random one."""
    given = next((one.runtime.seed for one in resolved if one.runtime.seed is not None), None)
    return random_seed() if given is None else given


def seed_of(row: InputRow, resolved: Resolved, start: int) -> int:
    """The seed of a row: its own, else one derived from `start`, the seed of the run."""
    own = resolved.runtime.seed if "seed" in row.params else None
    return row_seed(start, row.id, row.index) if own is None else own


def request_of(row: InputRow, resolved: Resolved, seed: int, lane: str = "") -> Request:
    """The request of one row. Its lane is named after the row unless `lane` is given."""
    return Request(lane or row.id, resolved, seed, row.prompt, row.prompt_ids, row.messages, row.place, row.index)


# -- the loading line --------------------------------------------------------------------------------------------------


def end_loading_line() -> list[Listener]:
    """A list with a listener that removes the loading line at the first output; empty if there is no line."""

    def end(event: Event) -> None:
        if not isinstance(event, (Began, Prefilled)):
            loading_line.end()

    return [end] if loading_line.exists() else []

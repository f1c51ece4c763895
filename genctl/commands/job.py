"""One run of a command: settings -> input -> checkpoint -> results. What the commands share is here."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from genctl.commands.engine_choice import LOCAL, EngineChoice, check_launch
from genctl.commands.messages import Messages, Reuse
from genctl.commands.options import ModelOptions
from genctl.config.check import shown
from genctl.config.layers import Layer, Resolved, overlay, resolve, row_layer
from genctl.engines.protocol import Engine, EngineSetup, JobPlan, Request, trained_length_note
from genctl.errors import Exit, GenctlError, UsageError, count
from genctl.events import Began, Event, Finished, Prefilled
from genctl.io import writers
from genctl.io.record_output import RecordOutput
from genctl.io.records import error_record, finite
from genctl.io.rows import BadRow, InputRow, random_seed, row_seed
from genctl.terminal import loading_line
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.standard_streams import is_terminal

if TYPE_CHECKING:
    from genctl.commands.page_file import PageFile

WIDTH = 16  # prompts decoded at once where nobody watches
SPAN = 8  # times as many rows are a group, which is decoded to its end before the next begins

Made = TypeVar("Made")
SomeOptions = TypeVar("SomeOptions", bound=ModelOptions)
Listener = Callable[[Event], object]
Rows = Iterator[InputRow | BadRow]


class Job(ABC, Generic[SomeOptions]):
    """One run of a command. A subclass opens its outputs, loads, decodes and writes; the engine computes."""

    what = "prompt"  # a row of the input
    reading: ClassVar[Mapping[str, Any]] = {}  # how the input is read, besides the options

    def __init__(self, options: SomeOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        self.options, self.interrupt, self.choice = options, interrupt, choice
        self.loaded: Engine | None = None  # the newest engine, which is to be closed
        self.listeners: list[Listener] = []  # each gets every event, in this order
        self.output: RecordOutput | None = None  # of records, one or more for each row
        self.live = False  # results are shown while they are made, and not written
        self.shown = False  # the view shows results in place of `output`
        self.view: Any = None  # draws what is live; `hide` takes it away
        self.failed = 0  # rows
        self.scaled_lanes: dict[str, Began] = {}  # lanes whose texts may be longer than those of the training
        self.lone = False  # there is one prompt, so messages do not say which
        self.failures: dict[str, tuple[str, str]] = {}  # what messages call a row that failed, and what may help; by id
        self.messages = Messages(quiet=options.quiet, verbose=options.verbose, color=options.color, hide=self.hide)
        self.load_s = 0.0
        self.page: PageFile | None = None  # of --report
        self.reuse = Reuse(None)
        interrupt.hide = self.hide

    @classmethod
    def perform(cls, options: SomeOptions, choice: EngineChoice = LOCAL) -> int | None:
        """Do what the options say. Returns the exit status, or None if there is no input."""
        with Interrupt() as interrupt, ExitStack() as stack:
            if not options.verbose:
                stack.enter_context(_libraries_hushed())
            job = cls(options, interrupt, choice)
            if not choice.follows:
                job.messages.note(*options.unread_files)
            status = job.prepare()
            if status is None:
                choice.meet(stack)
                found = choice.agree(not choice.follows and job.read(stack))
                if found:
                    status = job.follow() if choice.follows else job.run()
            return status

    def prepare(self) -> int | None:
        """Settings without those of the checkpoint. Returns the exit status where that is all, else None."""
        self.layers = self.options.layers()
        self.early = resolve(self.layers, tentative=True)
        self.check_early(self.early)
        self.choice.check(self.options, self.early)
        return None

    def check_early(self, resolved: Resolved) -> None:
        """Raises UsageError for settings that cannot be used together with the options or with this launch."""
        check_key(resolved)
        if resolved.runtime.tensor_parallel or "WORLD_SIZE" in os.environ:  # each process would do the whole job
            check_launch(resolved.runtime, shares=self.choice.ranks)

    def read(self, stack: ExitStack) -> bool:
        """Open the input. Returns whether there is one."""
        rows = self.options.prompts(self.messages.print, **self.reading)
        if rows is not None:
            self.input: Rows = iter(stack.enter_context(rows))
            self.lone = rows.is_alone()
        return rows is not None

    def run(self) -> int:
        """Load, decode, write. Returns the exit status."""
        with ExitStack() as stack:
            if not self.options.force:
                writers.check_absent(self.options.new_files)
            self.open_pictures(stack)
            # contexts close in reverse order: an engine may take longer than the outputs
            stack.push(lambda kind, *_: self.close_engine(failed=kind is not None))
            self.open(stack)
            self.load()
            self.deliver(stack)
        self.messages.close()
        return self.status()

    @property
    def waits(self) -> bool:
        """Whether rows come from a pipe or a person, so that the next one may take long."""
        return not self.options.arguments and self.options.input in (None, "-")

    def follow(self) -> int:
        """Compute beside the rank that reads and writes. Returns the exit status."""
        engine: Any = self.load_engine(self.early, self.layers, waits=self.waits)
        self.settle(engine, self.layers)
        return int(engine.follow())

    @abstractmethod
    def open(self, stack: ExitStack) -> None:
        """Open outputs and views. What is opened is closed by `stack`."""

    def load(self) -> None:
        """Load the checkpoint and check the settings on it. Where there are several, `deliver` loads them."""

    @abstractmethod
    def deliver(self, stack: ExitStack) -> None:
        """Decode the prompts and write the results."""

    def status(self) -> int:
        """The exit status. Raises CheckError where a requested check failed."""
        return self.interrupt.status or int(Exit.ROWS_FAILED if self.failed else Exit.DONE)

    # -- on the terminal -----------------------------------------------------------------------------------------------

    def open_consoles(self) -> None:
        """Make `out` for results and `err` for everything else."""
        from genctl.terminal.console import make_consoles

        self.out, self.err = make_consoles(self.options.color)

    def hide(self) -> None:
        """Take away what moves on the terminal."""
        if self.view is not None:
            self.view.hide()

    def of(self, row: InputRow | BadRow, *more: str) -> str:
        """What a message is about, before its colon: `prompt 2, run a: `; "" where there is nothing to tell apart."""
        words = [*([] if self.lone else [f"{self.what} {row.name}"]), *more]
        return f"{', '.join(words)}: " if words else ""

    def print_failure(self, record: Mapping[str, Any]) -> None:
        """Print why a row failed, once for all rows that failed alike."""
        self.messages.error(record["error"]["message"], *self.failures.pop(record["id"], ()))

    # -- outputs -------------------------------------------------------------------------------------------------------

    def open_event_log(self, stack: ExitStack, path: str | None) -> None:
        """Add the listener that writes --events."""
        if path is not None:
            from genctl.commands.event_log import event_writer

            self.listeners.append(event_writer(stack, path, force=self.options.force))

    def open_pictures(self, stack: ExitStack) -> None:
        """Begin the page of --report, which listens to all events and is written by `stack`."""
        if self.options.report is not None:
            self.open_page(stack, self.options.report)

    def open_page(self, stack: ExitStack, path: str) -> None:
        """Begin the page."""
        from genctl.commands.page_file import PageFile

        options = self.options
        elsewhere = options.arguments or options.input not in (None, "-") or getattr(options, "expect", None)
        page = PageFile(path, force=options.force, piped="" if elsewhere else options.input_kind)
        self.page = stack.enter_context(page)
        self.listeners.append(page.feed)

    def sink(self, stack: ExitStack, path: str | None, *, at_once: bool = False) -> writers.Sink:
        """Where results go; an error gives it up, so that no old file is lost to it. `at_once`: there when whole."""
        stdout = None if at_once else sys.stdout
        sink = writers.open_output(path, stdout, force=self.options.force, at_once=at_once)
        stack.callback(sink.abandon)
        return sink

    def report_sink(self, stack: ExitStack) -> writers.Sink | None:
        """Where what is found goes; None: as text to the screen."""
        options: Any = self.options
        return self.sink(stack, options.output) if options.format != "text" or options.to_file else None

    # -- load ----------------------------------------------------------------------------------------------------------

    def setup(
        self, resolved: Resolved, layers: Sequence[Layer], *, need_tokenizer: bool | None = None, **how: Any
    ) -> EngineSetup:
        """What an engine is loaded with. `layers` are checked before weights are read; `how` has more fields."""
        return EngineSetup(
            resolved.runtime,
            tuple(layers),
            self.options.are_texts if need_tokenizer is None else need_tokenizer,
            allow_plugins=self.options.allows("allow_plugins"),
            named=resolved.names_model,
            on_plan=self.planned_prompt,
            note=self.messages.note,
            remark=self.messages.remark,
            interrupted=self.interrupt,
            **{**self.options.trust, **how},
        )

    def load_engine(
        self, resolved: Resolved, layers: Sequence[Layer] = (), *, choice: EngineChoice | None = None, **how: Any
    ) -> Engine:
        """The checkpoint of these settings, or its servers, in place of the engine before. `how`: see `setup`."""
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

    def planned_prompt(self, tokens: int) -> None:
        """Say how long the prompt is that is read next, where a person waits for it alone."""
        if self.live and self.lone:
            loading_line.status(f"reading {count(tokens, 'token')}", restart=False)

    def show_prompt(self, row: InputRow | BadRow | None) -> None:
        """Show a prompt at once, in the line that says that the checkpoint is loaded."""
        if isinstance(row, InputRow) and row.prompt:
            from genctl.terminal.text_width import middle_cells

            prompt = row.prompt.rstrip()
            loading_line.show_prompt(lambda width: middle_cells(prompt, width))

    def sign_listeners(self) -> list[Listener]:
        """What takes that line away once there is something to draw: a listener, if there is the line."""

        def end(event: Event) -> None:
            if not isinstance(event, (Began, Prefilled)):
                loading_line.end()

        return [end] if loading_line.exists() else []

    def close_engine(self, *, failed: bool = False) -> None:
        """End what the engine has started."""
        if self.loaded is not None:
            hurried = bool(self.interrupt.status)
            self.loaded.close(hurried=hurried, failed=failed and not hurried)
        self.loaded = None

    def settle(
        self, engine: Engine, layers: Sequence[Layer], strategy_name: str | None = None
    ) -> tuple[Resolved, JobPlan]:
        """The settings with those of the checkpoint beneath them. Raises where the checkpoint cannot do the job."""
        resolved = engine.resolve(layers)
        plan = engine.plan(resolved)
        if strategy_name is not None:
            from genctl.config import modes

            modes.check(strategy_name, plan.strategy)
        return resolved, plan

    def describe(self, resolved: Resolved, plan: JobPlan, prefix: str = "") -> None:
        """Notes on the settings, and on what the engine makes of them."""
        self.messages.detail(*(f"{prefix}{line}" for line in resolved.notes))
        self.messages.note(*(f"{prefix}{line}" for line in (*resolved.notices, *plan.remarks)))
        if not is_terminal(sys.stdout):
            self.messages.note_once(resolved.sampling_note, prefix)

    # -- requests ------------------------------------------------------------------------------------------------------

    def settings_of(self, row: InputRow, base: Resolved) -> Resolved:
        """The settings of one row: `base`, with the row's own above it. Raises PresetError or InputError."""
        own = {**row.params, **{key: value for key, value in row.extra.items() if key != "reference"}}
        return overlay(base, row_layer(own, row.where)) if own else base

    def usable(self, rows: Rows, make: Callable[[InputRow], Made]) -> Iterator[tuple[InputRow, Made]]:
        """Each row with what `make` makes of it; a row that is bad, or of which it makes nothing, fails."""
        for row in rows:
            if isinstance(row, BadRow):
                self.fail(row, row.code, row.message)
                continue
            try:
                made = make(row)
            except GenctlError as error:
                self.fail(row, error.code, error.message)
            else:
                yield row, made

    def fail(
        self, row: InputRow | BadRow, code: str, message: str, *, already_shown: bool = False, hint: str = ""
    ) -> None:
        """Count a row that failed, and write its record, or print why unless it is `already_shown`."""
        self.failed += 1
        if self.page is not None:
            self.page.failed(row.id, code, message)
        record = error_record(row.id, code, message, row.columns)
        self.failures[row.id] = self.of(row), hint
        with self.interrupt.busy():
            if (self.output is None or self.shown) and not already_shown:
                self.print_failure(record)
            if self.output is not None:
                self.output.put(row.index, [record])

    # -- stream --------------------------------------------------------------------------------------------------------

    def listen(self, stream: Generator[Event, None, None], listeners: Sequence[Listener]) -> None:
        """Give each event to all listeners, in order."""
        with closing(stream):
            for event in stream:
                if isinstance(event, Began) and (columns := self.source_of(event.lane)[0].columns):
                    event = replace(event, input=finite(columns))
                with self.interrupt.busy():
                    for listener in listeners:
                        listener(event)

    def source_of(self, lane: str) -> tuple[InputRow, Resolved]:
        """The row of a lane that begins, and the settings of its run."""
        raise NotImplementedError

    def note_prompt(self, event: Event) -> None:
        """A listener that says which prompts were shortened, once for all runs that read one alike, and other notes."""
        if isinstance(event, Finished) and (began := self.scaled_lanes.pop(event.lane, None)) is not None:
            before = 0 if began.encoder_decoder else event.prompt_tokens
            if any(before + one.length > began.settings["trained"] for one in event.hypotheses):
                self.messages.note_once(
                    trained_length_note(began.settings["trained"]), self.of(self.source_of(event.lane)[0])
                )
        if isinstance(event, Began) and "trained" in event.settings:
            self.scaled_lanes[event.lane] = event
        if not isinstance(event, Began) or not event.settings.keys() & {"note", "truncated"}:
            return
        row, resolved = self.source_of(event.lane)
        self.messages.note_once(event.settings.get("note", ""), self.of(row))
        taken = event.settings.get("truncated", 0)
        were = count(taken, "token was", "tokens were")
        side = row.params.get("truncate", resolved.runtime.truncate)
        note = f"{self.of(row)}{were} taken from the prompt (--truncate {side})"
        if taken and self.messages.is_new(note):
            self.messages.remark(note)

    def _rescue(self, stack: ExitStack) -> None:
        """The model does not return after a signal: write what there is, from the thread that noticed."""
        self.keep_partial()
        stack.close()
        self.messages.close()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()

    def keep_partial(self) -> None:
        """Write what the unfinished rows have so far."""


@contextmanager
def _libraries_hushed() -> Iterator[None]:
    """No log record and no warning of a library reaches the terminal; what a person has to know, genctl says itself."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def check_key(resolved: Resolved) -> None:
    """Raises UsageError for a server that gets a key, and that a file chooses which is not the user's own."""
    setting = resolved.settings.get("backend")
    if setting is None or not setting.foreign or setting.value is None:
        return
    from genctl.engines.server.address import key_of, read

    if any(key_of(address)[0] for address in read(setting.value)):
        raise UsageError(
            f"{setting.place}: backend = {shown(setting.value)}: this server would be sent your API key, and a file "
            "outside your own folder cannot choose it",
            hint="name it with --backend, GENCTL_BACKEND or in your own config.toml",
        )


def start_seed(*resolved: Resolved) -> int:
    """The seed of a run: the first that is set, else a random one."""
    given = next((one.runtime.seed for one in resolved if one.runtime.seed is not None), None)
    return random_seed() if given is None else given


def seed_of(row: InputRow, resolved: Resolved, start: int) -> int:
    """The seed of a row: its own, else made of `start`, the seed of the run."""
    own = resolved.runtime.seed if "seed" in row.params else None
    return row_seed(start, row.id, row.index) if own is None else own


def request_of(row: InputRow, resolved: Resolved, seed: int, lane: str = "") -> Request:
    """The request of one row. Its lane is named by the row, unless `lane` says otherwise."""
    return Request(lane or row.id, resolved, seed, row.prompt, row.prompt_ids, row.messages, row.place, row.index)

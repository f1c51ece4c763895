"""One run of a command: load -> requests -> stream -> deliver. What the commands share is here."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from genctl.batch import writers
from genctl.batch.rows import BadRow, InputRow
from genctl.batch.seeds import row_seed
from genctl.cli import first_sign, notes, strategy
from genctl.cli.event_log import EventFile
from genctl.cli.inputs import are_texts
from genctl.cli.interrupt import Interrupt
from genctl.cli.options import ModelOptions
from genctl.config.layers import Layer, Resolved, overlay, row_layer
from genctl.errors import Exit
from genctl.events import Event
from genctl.params import Runtime

if TYPE_CHECKING:
    from genctl.requests import Request
    from genctl.session import Session

WIDTH = 16  # prompts decoded at once where nobody watches
SPAN = 8  # times as many rows are a group, which is decoded to its end before the next begins

SomeOptions = TypeVar("SomeOptions", bound=ModelOptions)
Listener = Callable[[Event], object]


class Job(ABC, Generic[SomeOptions]):
    """One run of a command. A subclass opens its outputs, loads, decodes and writes."""

    def __init__(self, options: SomeOptions, interrupt: Interrupt) -> None:
        self.options, self.interrupt = options, interrupt
        self.listeners: list[Listener] = []  # each gets every event, in this order
        self.view: Any = None  # draws what is live; `hide` takes it away
        self.failed = 0  # rows
        self.lone = False  # there is one prompt, so messages do not say which
        self.load_s = 0.0
        self.reuse = notes.Reuse(None)

    def run(self) -> int:
        """Load, decode, write. Returns the exit status."""
        with ExitStack() as stack:
            if not self.options.verbose:
                stack.enter_context(_libraries_hushed())
            self.open(stack)
            self.load()
            self.deliver(stack)
        return self.status()

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

    def open_consoles(self) -> None:
        """Make `out` for results and `err` for everything else."""
        from genctl.render.console import make_consoles

        self.out, self.err = make_consoles(self.options.color)

    def hide(self) -> None:
        """Take away what moves on the terminal."""
        if self.view is not None:
            self.view.hide()

    def say(self, line: str) -> None:
        """Print one line on standard error."""
        from genctl.render.message import print_message

        self.hide()
        print_message(line)

    def of(self, row: InputRow | BadRow, *more: str, what: str = "prompt") -> str:
        """What a message is about, before its colon: `prompt 2, run a: `; "" where there is nothing to tell apart."""
        words = [*([] if self.lone else [f"{what} {row.name}"]), *more]
        return f"{', '.join(words)}: " if words else ""

    def note(self, *lines: str) -> None:
        """Print notes on standard error, but not with --quiet."""
        for line in () if self.options.quiet else lines:
            self.say(f"note: {line}")

    def detail(self, *lines: str) -> None:
        """Print notes on standard error, with --verbose only."""
        for line in lines if self.options.verbose else ():
            self.say(f"note: {line}")

    def open_event_log(self, stack: ExitStack, path: str | None, *, force: bool) -> None:
        """Add the listener that writes --events."""
        if path is not None:
            self.listeners.append(stack.enter_context(EventFile(path, force=force)).write)

    def sink(self, stack: ExitStack, path: str | None, *, force: bool, stdout: Any = None) -> writers.Sink:
        """Where results go; an error gives it up, so that no old file is lost to it."""
        sink = writers.open_output(path, stdout, force=force)
        stack.callback(sink.abandon)
        return sink

    # -- load ----------------------------------------------------------------------------------------------------------

    def load_session(
        self,
        runtime: Runtime,
        layers: Sequence[Layer] = (),
        *,
        on_event: Callable[[Any], None] | None,
        need_tokenizer: bool | None = None,
    ) -> Session:
        """The checkpoint of `runtime`. `layers` are checked before its weights are read."""
        options, began = self.options, time.perf_counter()
        from genctl.session import Session

        session = Session.load(
            runtime,
            allow_pickle=options.allow_pickle,
            trust_remote_code=options.trust_remote_code,
            allow_plugins=options.allow_plugins,
            on_event=on_event,
            layers=layers,
            need_tokenizer=are_texts(options) if need_tokenizer is None else need_tokenizer,
        )
        self.load_s += time.perf_counter() - began
        first_sign.clear()
        self.hide()
        notes.announce_compiling(session, self.say, quiet=options.quiet)
        self.reuse = notes.Reuse(runtime.prompt_cache)
        return session

    def settle(self, session: Session, layers: Sequence[Layer], strategy_name: str | None = None) -> Resolved:
        """The settings with those of the checkpoint beneath them. Raises where the checkpoint cannot do the job."""
        resolved = session.resolve(layers)
        kind = session.check(resolved)
        if strategy_name is not None:
            strategy.check(strategy_name, kind)
        return resolved

    # -- requests ------------------------------------------------------------------------------------------------------

    def settings_of(self, row: InputRow, base: Resolved) -> Resolved:
        """The settings of one row: `base`, with the row's own above it. Raises PresetError or InputError."""
        own = {**row.params, **{key: value for key, value in row.extra.items() if key != "reference"}}
        return overlay(base, row_layer(own, row.where)) if own else base

    # -- stream --------------------------------------------------------------------------------------------------------

    def listen(self, stream: Generator[Event, None, None], listeners: Sequence[Listener]) -> None:
        """Give each event to all listeners, in order."""
        with closing(stream):
            for event in stream:
                with self.interrupt.busy():
                    for listener in listeners:
                        listener(event)

    def _rescue(self, stack: ExitStack) -> None:
        """The model does not return after a signal: write what there is, from the thread that noticed."""
        self.keep_partial()
        stack.close()
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


def seed_of(row: InputRow, resolved: Resolved, start: int) -> int:
    """The seed of a row: its own, else made of `start`, the seed of the run."""
    own = resolved.runtime.seed if "seed" in row.params else None
    return row_seed(start, row.id, row.index) if own is None else own


def request_of(row: InputRow, resolved: Resolved, seed: int, lane: str = "") -> Request:
    """The request of one row. Its lane is named by the row, unless `lane` says otherwise."""
    from genctl.requests import Request

    return Request(lane or row.id, resolved, seed, row.prompt, row.prompt_ids, row.messages, row.place)

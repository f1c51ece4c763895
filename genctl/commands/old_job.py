"""Jobs that are still classes: what their functions will take from `Job`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Generic, TypeVar

from genctl.commands import job
from genctl.commands.engine_choice import LOCAL, EngineChoice
from genctl.commands.job import Listener, Made, Row
from genctl.commands.options import ModelOptions
from genctl.config.layers import Layer, Resolved, resolve
from genctl.engines.protocol import Engine, JobPlan
from genctl.events import Event
from genctl.io.rows import InputRow
from genctl.terminal.interrupt import Interrupt

SomeOptions = TypeVar("SomeOptions", bound=ModelOptions)
Rows = Iterator[Row]


class OldJob(job.Job, ABC, Generic[SomeOptions]):
    """One run of a command. A subclass opens its outputs, loads, decodes and writes; the engine computes."""

    what = "prompt"
    reading: ClassVar[Mapping[str, Any]] = {}
    options: SomeOptions

    def __init__(self, options: SomeOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        super().__init__(options, interrupt, choice, ExitStack(), self.what)
        self.note_prompt = self.prompt_notes(self.source_of)

    @property
    def lone(self) -> bool:
        return self.single_prompt

    @lone.setter
    def lone(self, value: bool) -> None:
        self.single_prompt = value

    @classmethod
    def perform(cls, options: SomeOptions, choice: EngineChoice = LOCAL) -> int | None:
        """Do what the options say. Returns the exit status, or None if there is no input."""
        with job.started(options, choice) as context:
            one = cls(options, context.interrupt, choice)
            one.stack = context.stack
            status = one.prepare()
            if status is None:
                choice.meet(one.stack)
                found = choice.agree(not choice.follows and one.read_input(one.stack))
                if found:
                    status = one.follow() if choice.follows else one.run()
            return status

    def prepare(self) -> int | None:
        self.layers = self.options.layers()
        self.early = resolve(self.layers, tentative=True)
        self.check_early(self.early)
        self.choice.check(self.options, self.early)
        return None

    def check_early(self, resolved: Resolved) -> None:
        job.check_early(resolved, shares=self.choice.ranks)

    def read_input(self, stack: ExitStack) -> bool:
        rows = self.read(**self.reading)
        if rows is not None:
            self.input = rows
        return rows is not None

    def run(self) -> int:
        with self.outputs() as stack:
            self.open(stack)
            self.load()
            self.deliver(stack)
        return self.status()

    def follow(self) -> int:
        engine: Any = self.load_engine(self.early, self.layers, waits=self.waits)
        self.settle(engine, self.layers)
        return int(engine.follow())

    @abstractmethod
    def open(self, stack: ExitStack) -> None: ...

    def load(self) -> None: ...

    @abstractmethod
    def deliver(self, stack: ExitStack) -> None: ...

    def open_consoles(self) -> None:
        from genctl.terminal.console import make_consoles

        self.out, self.err = make_consoles(self.options.color)

    def of(self, row: Row, *more: str) -> str:
        return self.row_label(row, *more)

    def print_failure(self, record: Mapping[str, Any]) -> None:
        self.messages.failure(record)

    def show_prompt(self, row: Row | None) -> None:
        job.show_prompt(row)

    def sign_listeners(self) -> list[Listener]:
        return job.end_loading_line()

    def settle(
        self, engine: Engine, layers: Sequence[Layer], strategy_name: str | None = None
    ) -> tuple[Resolved, JobPlan]:
        return job.settle(engine, layers, strategy_name)

    def settings_of(self, row: InputRow, base: Resolved) -> Resolved:
        return job.settings_of(row, base)

    def usable(self, rows: Rows, make: Callable[[InputRow], Made]) -> Iterator[tuple[InputRow, Made]]:
        return job.usable(rows, make, self.fail)

    def listen(self, stream: Generator[Event, None, None], listeners: Sequence[Listener], source: Any = None) -> None:
        super().listen(stream, listeners, self.source_of)

    def source_of(self, lane: str) -> tuple[InputRow, Resolved]:
        raise NotImplementedError

    def _rescue(self, stack: ExitStack) -> None:
        self.keep_partial()
        self.rescue(stack)

    def keep_partial(self) -> None: ...

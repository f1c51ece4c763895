"""A command's notes and errors on standard error, and the counts for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from genctl import events
from genctl.engines.protocol import Engine
from genctl.io.records import error_record
from genctl.io.rows import BadRow, InputRow

_PLACE = re.compile(r",? ?\b(line|record|argument) \d+(?=:)")  # the place in the input, ignored in comparisons


class RepeatedErrors:
    """Prints an error once. Errors with the same message are counted, and `close` prints how many more there were."""

    def __init__(self, print_line: Callable[[str], object]) -> None:
        self._print = print_line
        self._more: dict[str, int] = {}

    def is_new(self, message: str) -> bool:
        """Whether this is the first error with its message (ignoring the place in the input). Counts the others."""
        key = _PLACE.sub("", message).removeprefix(": ")
        self._more[key] = self._more.get(key, -1) + 1
        return self._more[key] == 0

    def close(self) -> None:
        """Print how many more there were of each message. A second call prints nothing."""
        several = len(self._more) > 1
        for message, more in self._more.items():
            if more:
                self._print(f"error: {more:,} more like it" + (f": {message}" if several else ""))
        self._more.clear()


class FailedRecord(dict[str, Any]):
    """The record of a failed row. Its message is printed if the output has no place for records."""

    def __init__(self, row: InputRow | BadRow, code: str, message: str, *, subject: str, hint: str) -> None:
        super().__init__(error_record(row.id, code, message, row.columns))
        self.subject, self.hint = subject, hint


class Messages:
    """Messages to the user. `hide` clears moving output from the terminal before a line is printed.

    `quiet` leaves notes out, `verbose` adds details. If `held` is a list, notes wait in it for `release`.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        verbose: bool = False,
        color: str = "auto",
        hide: Callable[[], object] = lambda: None,
    ) -> None:
        self._quiet, self._verbose, self._color, self._hide = quiet, verbose, color, hide
        self._errors = RepeatedErrors(self.print)
        self._printed: set[str] = set()
        self.held: list[str] | None = None

    def print(self, line: str) -> None:
        """Print one line."""
        from genctl.terminal.standard_streams import print_message

        self._hide()
        print_message(line, color=self._color)

    def remark(self, line: str) -> None:
        """Print a note, even with --quiet."""
        if self.held is None:
            self.print(f"note: {line}")
        else:
            self.held.append(line)

    def remark_once(self, line: str) -> None:
        """Print a note the first time, even with --quiet."""
        if self.is_new(line):
            self.remark(line)

    def note(self, *lines: str) -> None:
        """Print notes, except with --quiet."""
        for line in () if self._quiet else lines:
            self.remark(line)

    def detail(self, *lines: str) -> None:
        """Print notes only with --verbose."""
        for line in lines if self._verbose else ():
            self.remark(line)

    def note_once(self, line: str, subject: str = "") -> None:
        """Print a note, if it is not empty, the first time; `subject` comes before it."""
        if line and self.is_new(line):
            self.note(f"{subject}{line}")

    def is_new(self, line: str) -> bool:
        """Whether this is the first call with a line."""
        new = line not in self._printed
        self._printed.add(line)
        return new

    def error(self, message: str, subject: str = "", hint: str = "") -> None:
        """Print an error and its hint, once for all errors with the same message."""
        if self._errors.is_new(message):
            self.print(f"error: {subject}{message}")
            self.advise(hint)

    def failure(self, record: Mapping[str, Any]) -> None:
        """Print why a row failed, once for all rows with the same error."""
        assert isinstance(record, FailedRecord)
        self.error(record["error"]["message"], record.subject, record.hint)

    def advise(self, hint: str) -> None:
        """Print a hint after an error, if there is one."""
        if hint:
            self.print(f"hint: {hint}")

    def shortage(self, what: str, width: int, fewer: int) -> None:
        """Report that memory is short."""
        self.remark(f"not enough memory for {width} {what} at once, continuing with {fewer}")

    def release(self) -> None:
        """Print the held notes, and stop holding them."""
        held, self.held = self.held or [], None
        for line in held:
            self.remark(line)

    def close(self) -> None:
        """Print how often each error was repeated."""
        self._errors.close()


@dataclass
class Reuse:
    """Counts the prompt tokens that `--prompt-cache` saved. Without `path` it has no listener and no notes."""

    path: str | None
    prompts: int = 0
    tokens: int = 0
    reused: int = 0
    useless: int = 0  # prompts for which nothing could be reused

    @property
    def listeners(self) -> list[Callable[[events.Event], object]]:
        """The listener that counts; [] without `path`."""
        return [] if self.path is None else [self._feed]

    def _feed(self, event: events.Event) -> None:
        if not isinstance(event, events.Prefilled) or event.shared:
            return
        self.prompts += 1
        self.tokens += event.prompt_tokens
        self.reused += event.reused
        self.useless += not event.reused

    def notes(self, engine: Engine, *, verbose: bool) -> list[str]:
        """Notes for the end of a run: on prompts for which nothing was reused, and with `verbose` the amount.

        `verbose` also adds notes about the model.
        """
        lines = list(engine.done.findings) if verbose else []
        if self.useless:
            amount = "nothing" if self.prompts == 1 else f"for {self.useless} of {self.prompts} prompts nothing"
            lines.append(f"{amount} of the prompt cache {self.path} could be reused: {engine.about.reuse_limit}")
        if verbose and self.prompts:
            lines.append(f"reused {self.reused} of {self.tokens} prompt token{'' if self.tokens == 1 else 's'}")
        return lines

"""Notes on a run: errors that many rows have, and the reuse of a saved prompt."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from genctl import events

if TYPE_CHECKING:
    from genctl.engines.protocol import Engine

_PLACE = re.compile(r",? ?\b(line|record|argument) \d+(?=:)")  # where in the input: no difference between two errors


class RepeatedErrors:
    """Prints an error once. Errors with the same message are counted, and `close` prints how many there were."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._more: dict[str, int] = {}

    def is_new(self, message: str) -> bool:
        """Whether this is the first error with its message, apart from its place in the input. Counts the others."""
        key = _PLACE.sub("", message).removeprefix(": ")
        self._more[key] = self._more.get(key, -1) + 1
        return self._more[key] == 0

    def close(self) -> None:
        """Say how many more there were of each message. A second call says nothing."""
        several = len(self._more) > 1
        for message, more in self._more.items():
            if more:
                self._say(f"error: {more:,} more like it" + (f": {message}" if several else ""))
        self._more.clear()


@dataclass
class Reuse:
    """Counts the prompt tokens that `--prompt-cache` saved. A listener of events; without `path` it has no notes."""

    path: str | None
    prompts: int = 0
    tokens: int = 0
    reused: int = 0
    useless: int = 0  # prompts for which nothing could be reused

    def feed(self, event: events.Event) -> None:
        """Take in one event."""
        if self.path is None or not isinstance(event, events.Prefilled) or event.shared:
            return
        self.prompts += 1
        self.tokens += event.prompt_tokens
        self.reused += event.reused
        self.useless += not event.reused

    def notes(self, engine: Engine, *, verbose: bool) -> list[str]:
        """Notes for the end of a run: if nothing was reused, and with `verbose` the amount.

        `verbose` also adds notes about the model.
        """
        lines = list(engine.done.findings) if verbose else []
        if self.useless:
            amount = "nothing" if self.prompts == 1 else f"for {self.useless} of {self.prompts} prompts nothing"
            lines.append(f"{amount} of the prompt cache {self.path} could be reused: {engine.about.reuse_limit}")
        if verbose and self.prompts:
            lines.append(f"reused {self.reused} of {self.tokens} prompt token{'' if self.tokens == 1 else 's'}")
        return lines

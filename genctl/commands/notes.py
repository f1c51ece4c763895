"""Notes on the reuse of a saved prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from genctl import events

if TYPE_CHECKING:
    from genctl.engines.protocol import Engine


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
        lines = list(engine.findings) if verbose else []
        if self.useless:
            amount = "nothing" if self.prompts == 1 else f"for {self.useless} of {self.prompts} prompts nothing"
            lines.append(f"{amount} of the prompt cache {self.path} could be reused: {engine.reuse_limit()}")
        if verbose and self.prompts:
            lines.append(f"reused {self.reused} of {self.tokens} prompt token{'' if self.tokens == 1 else 's'}")
        return lines

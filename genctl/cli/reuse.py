"""What a job says of the prompt cache that it was given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from genctl import events

if TYPE_CHECKING:
    from genctl.session import Session


@dataclass
class Reuse:
    """Counts the prompt tokens that `--prompt-cache` saved. A listener of events; without `path` it says nothing."""

    path: str | None
    prompts: int = 0
    tokens: int = 0
    reused: int = 0
    useless: int = 0  # prompts for which nothing could be reused
    _seen: dict[str, int] = field(default_factory=dict)

    def feed(self, event: events.Event) -> None:
        """Take in one event."""
        if self.path is None or not isinstance(event, events.Prefilled) or event.shared:
            return
        self.prompts += 1
        self.tokens += event.prompt_tokens
        self.reused += event.reused
        self.useless += not event.reused

    def notes(self, session: Session | None, *, verbose: bool) -> list[str]:
        """Notes for the end of a run: always where nothing was reused, with `verbose` also how much was.

        `verbose` adds what was found out about the model.
        """
        lines = list(session.forward.findings) if verbose and session is not None else []
        if self.useless:
            why = ""
            if session is not None and session.saved is not None:
                from genctl.inspecting.notes import reuse_limit

                why = f": {reuse_limit(session)}"
            what = "nothing" if self.prompts == 1 else f"for {self.useless} of {self.prompts} prompts nothing"
            lines.append(f"{what} of the prompt cache {self.path} could be reused{why}")
        if verbose and self.prompts:
            lines.append(f"reused {self.reused} of {self.tokens} prompt token{'' if self.tokens == 1 else 's'}")
        return lines

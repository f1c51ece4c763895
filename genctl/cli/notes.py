"""Notes of a job on standard error: the cache, compiling, and prompts that were cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from genctl import events
from genctl.batch.rows import InputRow
from genctl.params import Runtime
from genctl.plural import count

if TYPE_CHECKING:
    from genctl.config.layers import Resolved
    from genctl.session import Session


def cache_notes(session: Session, resolved: Resolved) -> list[str]:
    """A sentence for each effect of the cache settings that their names do not say."""
    from genctl.inspecting import notes

    return notes.cache_notes(session, resolved)


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
            what = "nothing" if self.prompts == 1 else f"for {self.useless} of {self.prompts} prompts nothing"
            lines.append(f"{what} of the prompt cache {self.path} could be reused{_why(session)}")
        if verbose and self.prompts:
            lines.append(f"reused {self.reused} of {count(self.tokens, 'prompt token')}")
        return lines


def _why(session: Session | None) -> str:
    if session is None or session.saved is None:
        return ""
    from genctl.inspecting.notes import reuse_limit

    return f": {reuse_limit(session)}"


def announce_compiling(session: Session, say: Callable[[str], None], *, quiet: bool) -> None:
    """Say as notes what compiling reports in the middle of a step; with `quiet`, say nothing."""
    if session.forward.compiled is not None:
        session.forward.compiled.say = (lambda line: None) if quiet else (lambda line: say(f"note: {line}"))


def cut_note(event: events.Event, row: InputRow | None, runtime: Runtime) -> str:
    """A note when a prompt begins that was shortened; "" for every other event."""
    taken = event.settings.get("truncated", 0) if isinstance(event, events.Began) else 0
    if not taken:
        return ""
    side = runtime.truncate if row is None else row.params.get("truncate", runtime.truncate)
    were = "token was" if taken == 1 else "tokens were"
    return f"{taken:,} {were} taken from the prompt (--truncate {side})"

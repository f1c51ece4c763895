"""Decoding in a worker: requests in, the events of their lanes out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from genctl import events
from genctl.config import named_strategies
from genctl.config.layers import Layer, Resolved
from genctl.requests import Report, Request

if TYPE_CHECKING:
    from genctl.session import Session
    from genctl.workers.worker import WorkerProgress


@dataclass(frozen=True)
class GenerateFacts:
    """What the driver must know of the checkpoint."""

    base: Resolved  # the settings on top of the checkpoint's own
    width: int  # prompts decoded at once
    watched: tuple[int, ...]
    texts: bool  # there is a tokenizer
    encoder_decoder: bool
    details: tuple[str, ...]  # notes for --verbose
    notes: tuple[str, ...]
    reuse_limit: str  # why a saved prompt may be useless


@dataclass(frozen=True)
class GenerateWork:
    """A group of prompts that are decoded together."""

    requests: tuple[Request, ...]
    report: Report
    width: int
    ahead: int = 0  # requests read ahead, so that the longest begins first


@dataclass(frozen=True)
class DecodedGroup:
    """The events of a group; the widths that it went on with where memory was short."""

    events: tuple[events.Event, ...]
    shortages: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerateTask:
    """Decode prompts. Steps that the driver has no use for are left out (`without_steps`)."""

    strategy: str | None
    watch: tuple[str, ...]
    width: int  # unless the settings say another
    steps: bool  # the driver reads all of them
    parents: bool  # records say which row each token of a beam continued

    def open(self, session: Session, layers: tuple[Layer, ...]) -> GenerateFacts:
        """Resolve the settings and check them on the checkpoint."""
        from genctl.inspecting.notes import cache_notes, reuse_limit

        base = session.resolve(layers)
        kind = session.check(base)
        if self.strategy is not None:
            named_strategies.check(self.strategy, kind)
        return GenerateFacts(
            base,
            session.width(base, self.width),
            session.watched(self.watch),
            session.loaded.tokenizer is not None,
            session.forward.is_encoder_decoder,
            (*session.loaded.verbose_notes, *base.notes),
            (*base.notices, *cache_notes(session, base)),
            "" if base.runtime.prompt_cache is None else reuse_limit(session),
        )

    def perform(self, session: Session, work: GenerateWork, progress: WorkerProgress) -> DecodedGroup:
        """Decode a group to its end."""
        shortages: list[int] = []
        stream = session.stream(
            work.requests, work.report, width=work.width, on_shortage=shortages.append, ahead=work.ahead
        )
        counted = _counted(stream, progress)
        return DecodedGroup(tuple(counted if self.steps else without_steps(counted, self.parents)), tuple(shortages))


def _counted(stream: Iterator[events.Event], progress: WorkerProgress) -> Iterator[events.Event]:
    for event in stream:
        if isinstance(event, events.Stepped):
            progress.tokens += event.new_tokens
        elif isinstance(event, (events.Finished, events.Failed)):
            progress.rows += 1
        yield event


def without_steps(stream: Iterator[events.Event], parents: bool) -> Iterator[events.Event]:
    """The events without steps, which are most of what has to be sent. Their counts of drafts remain, in one step.

    With `parents` the steps of beam searches are kept.
    """
    drafts: dict[str, list[int]] = {}  # of the lanes that are left without steps: tokens tried, and accepted
    for event in stream:
        if isinstance(event, events.Began):
            if not (parents and "beam" in event.strategy):
                drafts[event.lane] = [0, 0]
        elif isinstance(event, events.Stepped) and event.lane in drafts:
            counts = drafts[event.lane]
            counts[0] += event.drafted
            counts[1] += event.accepted
            continue
        elif isinstance(event, (events.Finished, events.Failed)) and (counts := drafts.pop(event.lane, [0, 0]))[0]:
            yield events.Stepped(event.lane, 1, (), (), *counts)
        yield event

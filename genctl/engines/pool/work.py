"""Rows, as a worker works on them: requests to the events of their lanes, texts to their scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from genctl import events
from genctl.decode.threads import set_threads
from genctl.engines.protocol import Flow, Report, Request
from genctl.errors import GenctlError

if TYPE_CHECKING:
    from genctl.engines.local.session import Session
    from genctl.engines.scored_text import Options, Scored, TextToScore


# -- what a worker has done, for the progress bar ----------------------------------------------------------------------


class WorkerProgress:
    """What a worker has done since it began. The task counts here while it works on a group."""

    def __init__(self) -> None:
        self.group = -1
        self.rows = 0  # of that group, finished
        self.tokens = 0  # of all groups


@dataclass(frozen=True)
class DecodedGroup:
    """The events of a group; the widths that were too much for the memory, each with the one to go on with."""

    events: tuple[events.Event, ...]
    shortages: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class DecodeWork:
    """Requests: a group that is decoded together, or rows that join a running batch."""

    requests: tuple[Request, ...]
    report: Report
    width: int
    ahead: int = 0  # requests read ahead, so that the longest begins first
    threads: int | None = None  # that compute a step; None: as they are

    def perform(self, session: Session, progress: WorkerProgress) -> DecodedGroup:
        """Decode the group to its end. Steps that nobody reads are left out."""
        shortages: list[tuple[int, int]] = []
        stream = self.stream(session, self.requests, progress, shortages)
        return DecodedGroup(tuple(stream), tuple(shortages))

    def stream(
        self,
        session: Session,
        requests: Iterable[Request | None],
        progress: WorkerProgress,
        shortages: list[tuple[int, int]],
    ) -> Iterator[events.Event]:
        """The events of these or other requests, as they occur. `shortages` gets those of `DecodedGroup`."""
        if self.threads is not None:
            set_threads(self.threads)
        flow = Flow(self.width, ahead=self.ahead, on_shortage=lambda width, fewer: shortages.append((width, fewer)))
        counted = _counted(session.stream(requests, self.report, flow), progress)
        wanted = any(request.resolved.runtime.processed_logprobs for request in self.requests)
        return counted if self.report.steps or wanted else without_steps(counted, self.report.parents)


@dataclass(frozen=True)
class ScoredGroup:
    """The outcome of each text, and facts found about the model."""

    outcomes: tuple[list[Scored] | GenctlError, ...]
    findings: tuple[str, ...]


@dataclass(frozen=True)
class ScoreWork:
    """Texts that are scored together."""

    texts: tuple[TextToScore, ...]
    options: Options

    def perform(self, session: Session, progress: WorkerProgress) -> ScoredGroup:
        """Score the group."""
        outcomes = []
        options = dataclasses.replace(self.options, chunk=len(self.texts))
        for _, outcome in session.score(enumerate(self.texts), options):
            outcomes.append(outcome)
            progress.rows += 1
            if not isinstance(outcome, GenctlError):
                progress.tokens += sum(scored.count for scored in outcome)
        return ScoredGroup(tuple(outcomes), tuple(session.findings))


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

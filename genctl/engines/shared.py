"""The engine of `--tensor-parallel`: every rank runs the whole loop on the same requests.

Values that could differ between ranks come from rank 0: requests, settings, the clock, and whether to stop.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import replace

from genctl import events
from genctl.config.layers import Resolved
from genctl.engines.protocol import ALONE, EngineSetup, Flow, JobPlan, Report, Request, Rows, Skipped
from genctl.engines.session import Session, load_session
from genctl.errors import Exit, UsageError
from genctl.models import rank_group as group


class SharedSession(Session):
    """A rank's part of a checkpoint. Ranks other than 0 `follow`."""

    ended = ""  # why rank 0 ended the stream, if not at its end
    waits = False  # rank 0 may wait long for a row

    def plan(self, resolved: Resolved) -> JobPlan:
        """Check once whether all ranks together can run a job. Raises UsageError for other caches."""
        plan = super().plan(resolved)
        if (form := resolved.generation.cache_implementation) not in ("dynamic", "off"):
            raise UsageError(f"--tensor-parallel and --cache {form}: the cache is shared out as well, and grows")
        return plan

    def stream(
        self, requests: Rows, report: Report | None = None, flow: Flow = ALONE
    ) -> Generator[events.Event, None, None]:
        """Decode rank 0's requests on every rank (`Engine.stream`)."""
        self.clock = lambda: float(group.broadcast(time.perf_counter()))
        report, width, span, ahead = group.broadcast((report, flow.width, flow.span, flow.ahead))
        same = replace(
            flow, width=width, span=span, ahead=ahead, interrupted=lambda: str(group.broadcast(flow.interrupted()))
        )
        yield from super().stream(self._shared(requests), report, same)
        self.ended = str(group.broadcast(flow.interrupted()))

    def _shared(self, requests: Rows) -> Iterator[Request | Skipped]:
        """Rank 0's requests, on every rank."""
        rows = iter(requests)
        while (row := group.broadcast(next(rows, None), wait=self.waits)) is not None:
            yield row

    def follow(self) -> int:
        """Decode the requests of rank 0. Returns the exit status."""
        for _ in self.stream(()):
            pass
        return int(Exit.INTERRUPTED if self.ended else Exit.DONE)


def load_shared(setup: EngineSetup) -> SharedSession:
    """This rank's part of the checkpoint. Raises ModelError, UsageError or PresetError."""
    session = load_session(SharedSession, setup)
    session.waits = setup.waits
    return session

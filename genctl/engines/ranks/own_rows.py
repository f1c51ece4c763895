"""The engine of `--fsdp`: ranks share the parameters, and each decodes rows of its own.

Rank 0 distributes the rows of each group, and returns the events of all ranks in the order of the input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from genctl import events
from genctl.config.layers import Resolved
from genctl.engines.local.session import Session, load_session
from genctl.engines.protocol import ALONE, EngineSetup, Flow, Report, Request, Rows, grouped
from genctl.errors import Exit, ModelError, UsageError
from genctl.models import rank_group as group

if TYPE_CHECKING:
    from genctl.models.fully_sharded import Pace


class OwnRowsSession(Session):
    """A rank's part of every parameter. Ranks other than 0 `follow`."""

    ended = ""  # why rank 0 ended the stream, if not at its end
    waits = False  # rank 0 may wait long for a row

    def check(self, resolved: Resolved) -> str:
        """Check once whether ranks can run a job. Raises UsageError for strategies that call parts of the model."""
        kind = super().check(resolved)
        if self.reads_hidden(resolved):
            raise UsageError("--fsdp: this strategy uses parts of the model apart from it, so ranks cannot keep step")
        return kind

    def stream(
        self, requests: Rows, report: Report | None = None, flow: Flow = ALONE
    ) -> Generator[events.Event, None, None]:
        """Distribute the rows of each group (`Engine.stream`); a group has rows for every rank."""
        from genctl.models.fully_sharded import Pace

        rank, ranks = dist.get_rank(), dist.get_world_size()
        report, width, span = group.broadcast((report, flow.width, flow.span))
        pace = Pace(self.loaded.model)
        reason = flow.interrupted if rank == 0 else lambda: "interrupted" if pace.agreed else ""
        groups = (tuple(rows) for rows in grouped(requests, max(span or 1, width * ranks)))
        while (rows := group.from_rank_0(lambda: next(groups, None), waits=self.waits)) is not None:
            parts = group.gathered(self._own(rows[rank::ranks], report, width, pace, reason))
            if parts is not None:
                yield from _in_order(rows, parts)
        self.ended = str(group.broadcast(flow.interrupted()))

    def _own(
        self, requests: tuple[Request, ...], report: Report, width: int, pace: Pace, reason: Callable[[], str]
    ) -> list[events.Event]:
        """The events of this rank's rows, while all ranks keep step."""

        def stopped() -> str:
            pace.signal = int(bool(reason())) if dist.get_rank() == 0 else 0
            return reason()

        def too_much(width: int, fewer: int) -> None:
            raise ModelError(f"rank {dist.get_rank()}: not enough memory for {width} prompts at once")

        stopped()
        own_events: list[events.Event] = []
        if requests:
            own_events += super().stream(requests, report, Flow(width, interrupted=stopped, on_shortage=too_much))
        pace.idle()
        return own_events

    def follow(self) -> int:
        """Decode this rank's rows. Returns the exit status."""
        for _ in self.stream(()):
            pass
        return int(Exit.INTERRUPTED if self.ended else Exit.DONE)


def load_own_rows(setup: EngineSetup) -> OwnRowsSession:
    """This rank's part of the checkpoint. Raises ModelError, UsageError or PresetError."""
    session = load_session(OwnRowsSession, setup)
    session.waits = setup.waits
    return session


def _in_order(requests: tuple[Request, ...], parts: list[list[events.Event]]) -> Iterator[events.Event]:
    """The events of all ranks, row by row in input order."""
    of_lane: dict[str, list[events.Event]] = {}
    for event in itertools.chain.from_iterable(parts):
        assert not isinstance(event, events.Loading)
        of_lane.setdefault(event.lane, []).append(event)
    for request in requests:
        yield from of_lane.pop(request.id, [])

"""`genctl run --fsdp`: each rank decodes rows of its own; rank 0 reads them, and writes what all ranks made of them."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Any

from genctl import events
from genctl.cli.interrupt import Interrupt
from genctl.errors import ModelError, UsageError
from genctl.ranks.shared_run import RanksRun
from genctl.requests import Request


class PacedInterrupt(Interrupt):
    """Rank 0's signal as all ranks know it: `Pace` tells of it between two passes."""

    pace: Any = None

    def __call__(self) -> str:
        """The reason for every live row to end now."""
        self.status = self.status or (0 if self.pace is None else self.pace.heard)
        return super().__call__()


class OwnRowsRun(RanksRun):
    """One run of a generating command by several processes that share the parameters, and have rows of their own."""

    flag = "--fsdp"
    apart = True  # results come group by group, so there is nothing live

    def read(self, stack: ExitStack) -> bool:
        """Meet the other ranks; rank 0 opens the input and says whether there is one."""
        found = self.meet(stack)
        self.own = self.interrupt
        if self.launch.rank:
            self.interrupt = PacedInterrupt()
        return found

    def load(self) -> None:
        """Load the checkpoint, leave this rank its part, and agree on what ranks would choose by themselves."""
        from genctl.ranks import group
        from genctl.ranks.fully_sharded import Pace

        super().load()
        if self.session.is_remote or self.session.reads_hidden(self.base):
            raise UsageError("--fsdp: this strategy uses parts of the model apart from it, so ranks cannot keep step")
        self.pace = Pace(self.session.loaded.model)
        if isinstance(self.interrupt, PacedInterrupt):
            self.interrupt.pace = self.pace
        self.width, self.span, self.seed, self.base = group.heard((self.width, self.span, self.seed, self.base))

    def _decode(self) -> None:
        """Share out each group of rows, decode this rank's, and give rank 0 the events of all."""
        from genctl.ranks import group

        groups = self._groups()
        while (requests := self.from_rank_0(lambda: next(groups, None))) is not None:
            told = group.gathered(self._decoded(requests[self.launch.rank :: self.launch.size]))
            if told is not None:
                self.listen(_in_order(requests, told), self.listeners)
                if self.stop_at is not None:
                    self.output.stop(self.stop_at, self.stopper)
        self.interrupt.status = group.heard(self.interrupt.status)
        if not self.launch.rank and not self._cut_short:
            self.output.end_of_input(self.taken)

    def _groups(self) -> Iterator[tuple[Request, ...]]:
        """The requests of each group, on rank 0; one that has rows for every rank."""
        size = max(self.span, self.width * self.launch.size)
        for first in self.input:
            rows = itertools.chain([first], itertools.islice(self.input, size - 1 - first.index % size))
            yield tuple(self._requests(rows))
            if self.stop_at is not None or self.interrupt.status:
                return

    def _decoded(self, requests: tuple[Request, ...]) -> list[events.Event]:
        """The events of this rank's rows, while all ranks keep step."""
        if not self.launch.rank:
            self.pace.asked = self.own.status
        told: list[events.Event] = []
        if requests:
            stream = self.session.stream(
                requests, self._report(), width=self.width, interrupted=self._stopped, on_shortage=self._too_much
            )
            told += [event for event in stream if not isinstance(event, events.Loading)]
        self.pace.idle()
        return told

    def _stopped(self) -> str:
        if not self.launch.rank:
            self.pace.asked = self.own.status
        return self.interrupt()

    def _too_much(self, width: int) -> None:
        raise ModelError(f"rank {self.launch.rank}: not enough memory for {self.width} prompts at once")

    def status(self) -> int:
        """Rank 0's exit status; the others have nothing to tell of."""
        return super().status() if not self.launch.rank else self.interrupt.status


def _in_order(requests: tuple[Request, ...], told: list[list[events.Event]]) -> Generator[events.Event, None, None]:
    """The events of all ranks, row by row in input order."""
    of_lane: dict[str, list[events.Event]] = {}
    for event in itertools.chain.from_iterable(told):
        assert not isinstance(event, events.Loading)
        of_lane.setdefault(event.lane, []).append(event)
    for request in requests:
        yield from of_lane.pop(request.id, [])

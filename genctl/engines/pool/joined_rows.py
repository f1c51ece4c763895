"""Rows that a worker gets at different times, decoded in one running batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from genctl import events
from genctl.engines.pool.work import DecodedGroup, DecodeWork
from genctl.engines.protocol import Request

if TYPE_CHECKING:
    from genctl.engines.local.session import Session
    from genctl.engines.pool.work import WorkerProgress


@dataclass
class _Call:
    """Rows that came together."""

    number: int
    work: DecodeWork
    events: list[events.Event] = field(default_factory=list)
    result: Future[DecodedGroup] = field(default_factory=Future)


class JoinedRows:
    """A running batch of a session. A thread decodes it until no row is left, and begins again with the next."""

    def __init__(self, session: Session, progress: WorkerProgress) -> None:
        self.session, self.progress = session, progress
        self._lock = threading.Lock()
        self._unfinished: dict[int, _Call] = {}
        self._waiting: deque[_Call] = deque()  # calls whose rows have not begun
        self._decoding = False  # there is a thread

    def join(self, number: int, work: DecodeWork) -> Future[DecodedGroup]:
        """The events of rows that join as places become free. Work that comes again while it is done is done once."""
        with self._lock:
            call = self._unfinished.get(number)
            if call is None:
                call = self._unfinished[number] = _Call(number, work)
                self._waiting.append(call)
            if not self._decoding:
                self._decoding = True
                threading.Thread(target=self._decode, name="joined rows", daemon=True).start()
            return call.result

    def _decode(self) -> None:
        try:
            while (call := self._first()) is not None:
                self._decode_all(call.work)
        except BaseException as error:  # every call raises it
            with self._lock:
                calls, self._decoding = [*self._unfinished.values()], False
                self._unfinished.clear()
                self._waiting.clear()
            for call in calls:
                call.result.set_exception(error)

    def _first(self) -> _Call | None:
        """The call that waits longest; without one the thread is to end."""
        with self._lock:
            self._decoding = bool(self._waiting)
            return self._waiting[0] if self._waiting else None

    def _decode_all(self, work: DecodeWork) -> None:
        """Decode until no row is left, as `work` says: all calls of a run want the same, but for their rows."""
        lanes: dict[str, _Call] = {}  # that have not ended
        rows: dict[int, int] = {}  # how many of them each call has
        shortages: list[tuple[int, int]] = []

        def requests() -> Iterator[Request | None]:
            while self._waiting or lanes:
                if not self._waiting:
                    yield None
                    continue
                call = self._waiting.popleft()
                lanes.update((request.id, call) for request in call.work.requests)
                rows[call.number] = len(call.work.requests)
                yield from call.work.requests

        for event in work.stream(self.session, requests(), self.progress, shortages):
            assert not isinstance(event, events.Loading)
            call = lanes[event.lane]
            call.events.append(event)
            if not isinstance(event, (events.Finished, events.Failed)):
                continue
            del lanes[event.lane]
            rows[call.number] -= 1
            if not rows[call.number]:
                with self._lock:
                    del self._unfinished[call.number]
                call.result.set_result(DecodedGroup(tuple(call.events), tuple(shortages)))
                shortages.clear()

"""Requests in flight: a bounded number of threads, each with one request, and what they report."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from genctl.backend import retry
from genctl.backend.answer import AnswerPiece, Usage, pieces_of, usage_of
from genctl.backend.failure import Gone, Late, Trouble
from genctl.backend.lane import RemoteLane
from genctl.backend.server import Server


@dataclass(frozen=True, eq=False)
class Exchange:
    """One request: some sequences of a row."""

    lane: RemoteLane
    server: Server
    path: str
    body: dict[str, Any]
    slots: tuple[int, ...]  # the sequence of each choice of the answer
    seed: int
    top: int  # alternatives to report
    deadline: float | None = None  # on the monotonic clock


@dataclass(frozen=True)
class Attempt:
    """The request is sent, for the first time or again."""


@dataclass(frozen=True)
class Answered:
    """All of the answer is there."""

    usage: Usage | None


News: TypeAlias = Attempt | AnswerPiece | Answered | Late | Trouble


class Exchanges:
    """Threads that send requests and put what happens into `news`. They end with the process, or by `close`."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[tuple[Exchange, News]] = queue.SimpleQueue()
        self._due: queue.SimpleQueue[Exchange] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads = 0
        self.busy = 0  # requests in flight; counted by the caller's thread alone

    def send(self, exchange: Exchange) -> None:
        """Send a request. Whoever calls this sees to it that not too many are in flight."""
        self.busy += 1
        if self.busy > self._threads:
            self._threads += 1
            threading.Thread(target=self._work, name=f"request {self._threads}", daemon=True).start()
        self._due.put(exchange)

    def close(self) -> None:
        """Let go of all requests. An answer that is awaited now is not waited for."""
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                exchange = self._due.get(timeout=1.0)
            except queue.Empty:
                continue
            self._see_through(exchange)

    def _see_through(self, exchange: Exchange) -> None:
        """Send a request until it is answered. Exactly one Answered, Late or Trouble is the last news of it."""

        def gone() -> bool:
            return self._closed.is_set() or exchange.lane.over

        def tell(news: News) -> None:
            self.news.put((exchange, news))

        for attempt in range(1, retry.ATTEMPTS + 1):
            try:
                tell(Attempt())
                tell(Answered(_answer(exchange, gone, tell)))
                return
            except Gone:
                tell(Late())
                return
            except Late as late:
                tell(late)
                return
            except Trouble as trouble:
                if not trouble.again or attempt == retry.ATTEMPTS:
                    tell(_at_last(trouble, attempt))
                    return
                self._closed.wait(retry.pause_s(attempt, exchange.seed, trouble.wait_s))
            except Exception as error:
                tell(Trouble(f"unexpected {type(error).__name__}: {error}"))
                return


def _answer(exchange: Exchange, gone: Callable[[], bool], tell: Callable[[News], None]) -> Usage | None:
    """Send a request once and tell of its pieces. Raises Trouble where the answer is not whole."""
    usage: Usage | None = None
    left = set(range(len(exchange.slots)))
    client = exchange.server.client
    for part in client.stream(exchange.path, exchange.body, deadline=exchange.deadline, gone=gone):
        for piece in pieces_of(part, exchange.top):
            if piece.choice >= len(exchange.slots):
                raise Trouble(f"the answer has more than {len(exchange.slots)} sequences")
            tell(piece)
            if piece.finish is not None:
                left.discard(piece.choice)
        usage = usage_of(part) or usage
    if left:
        raise Trouble("the answer was cut off before its end", again=True)
    return usage


def _at_last(trouble: Trouble, attempt: int) -> Trouble:
    """The trouble of the last attempt, with their number."""
    if attempt == 1:
        return trouble
    return Trouble(f"{trouble.message} ({attempt} attempts)", fatal=trouble.fatal)

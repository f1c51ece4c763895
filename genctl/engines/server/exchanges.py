"""Requests in flight, each a task on the event loop of its server, and what they report."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from genctl.engines.server import failure
from genctl.engines.server.answer import AnswerPiece, Usage, pieces_of, usage_of
from genctl.engines.server.failure import Gone, Late, Trouble, one_line
from genctl.engines.server.lane import RemoteLane
from genctl.engines.server.server import Server

PARTS = 64  # of a stream for each token, at most: servers may send single characters


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
    most: int  # tokens that each sequence may have
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
    """Sends requests and puts what happens into `news`."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[tuple[Exchange, News]] = queue.SimpleQueue()
        self._sent: set[Future[None]] = set()
        self.busy = 0  # requests in flight; counted by the caller's thread alone

    def send(self, exchange: Exchange) -> None:
        """Send a request. The caller limits the number of requests in flight."""
        self.busy += 1
        future = exchange.server.client.start(self._see_through(exchange))
        self._sent.add(future)
        future.add_done_callback(self._sent.discard)

    def close(self) -> None:
        """Let go of all requests."""
        for future in list(self._sent):
            future.cancel()

    async def _see_through(self, exchange: Exchange) -> None:
        """Send a request until it is answered. Exactly one Answered, Late or Trouble is the last news of it."""
        client = exchange.server.client

        def tell(news: News) -> None:
            self.news.put((exchange, news))

        try:
            ask = partial(_answer, exchange, tell)
            answered = await failure.patiently(
                ask, seed=exchange.seed, deadline=exchange.deadline, say=client.note_pause
            )
            tell(Answered(answered))
        except (Gone, Late):
            tell(Late())
        except Trouble as trouble:
            tell(trouble)
        except Exception as error:  # whatever a server sends may cost its row, never the others
            tell(Trouble(f"unexpected {type(error).__name__}: {one_line(str(error))}"))


@dataclass
class _Answer:
    """One attempt at an answer: takes its parts and checks them."""

    exchange: Exchange
    tell: Callable[[News], None]
    usage: Usage | None = None
    lengths: dict[int, int] = field(default_factory=dict)  # choice -> tokens so far
    parts: dict[int, int] = field(default_factory=dict)  # choice -> parts so far, where tokens are not counted
    open: set[int] = field(default_factory=set)  # choices that have not ended

    def take(self, part: dict[str, Any]) -> bool:
        """Report the pieces of a part. Returns whether all sequences have ended. Raises Trouble or Gone."""
        exchange = self.exchange
        if exchange.lane.over:
            raise Gone
        doubts: set[str] = set()
        for piece in pieces_of(part, exchange.top, doubts):
            if piece.choice >= len(exchange.slots):
                raise Trouble(f"the answer has more than {len(exchange.slots)} sequences")
            if piece.choice not in self.open:
                continue
            piece = self._within(piece)
            self.tell(piece)
            if piece.finish is not None:
                self.open.discard(piece.choice)
        self.usage = usage_of(part, doubts) or self.usage
        for doubt in sorted(doubts):
            exchange.server.client.note(doubt)
        return not self.open

    def _within(self, piece: AnswerPiece) -> AnswerPiece:
        """The piece without the tokens that were not asked for, where the server counts its tokens.

        Raises Trouble for a stream that goes on without end.
        """
        if not piece.counted:
            parts = self.parts[piece.choice] = self.parts.get(piece.choice, 0) + 1
            if parts > PARTS * self.exchange.most:
                raise Trouble(f"the stream does not end: it has {parts} parts for at most {self.exchange.most} tokens")
            return piece
        before = self.lengths.get(piece.choice, 0)
        left = self.exchange.most - before
        self.lengths[piece.choice] = before + min(left, len(piece.tokens))
        if len(piece.tokens) <= left:
            return piece
        if all(not token.text for token in piece.tokens[left:]):  # the end, which some servers list as a token
            return replace(piece, tokens=piece.tokens[:left])
        self.exchange.server.client.note(f"a text has more than max_tokens = {self.exchange.most} tokens and is cut")
        return replace(piece, tokens=piece.tokens[:left], finish="length", stop=None)


async def _answer(exchange: Exchange, tell: Callable[[News], None]) -> Usage | None:
    """Send a request once and tell of its pieces. Raises Trouble where the answer is not whole."""
    tell(Attempt())
    answer = _Answer(exchange, tell, open=set(range(len(exchange.slots))))
    client = exchange.server.client
    await client.stream(
        exchange.path, exchange.body, answer.take, deadline=exchange.deadline, sequences=len(exchange.slots)
    )
    if answer.open:
        raise Trouble("the answer was cut off before its end", again=True)
    return _checked(exchange, answer)


def _checked(exchange: Exchange, answer: _Answer) -> Usage | None:
    """The tokens that the server has counted. A text that was cut here has as many as were kept."""
    usage, most = answer.usage, exchange.most * len(exchange.slots)
    if usage is None or usage.new is None or usage.new <= most:
        return usage
    if len(answer.lengths) == len(exchange.slots):
        return Usage(usage.prompt, sum(answer.lengths.values()))
    exchange.server.client.note(f"it counts {usage.new} tokens for a request of at most {most}")
    return usage

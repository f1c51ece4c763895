"""Requests in flight, each in a thread of its own, and what they report."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from genctl.engines.protocol import Request
from genctl.engines.server.answer import AnswerPiece, Usage, pieces_of, usage_of
from genctl.engines.server.failure import Disconnected, ServerError, TimedOut, one_line, retry
from genctl.engines.server.lane import RemoteLane
from genctl.engines.server.server import Server
from genctl.errors import GenctlError
from genctl.io.rows import row_seed

PARTS = 64  # of a stream for each token, at most: servers may send single characters
FEWEST = 1024  # parts that any stream may have


@dataclass(frozen=True, eq=False)
class Exchange:
    """One request: some sequences of a row."""

    request: Request
    lane: RemoteLane
    server: Server
    path: str
    body: Callable[[int, int], dict[str, Any]]  # by seed and number of sequences, as far as the server is known
    slots: tuple[int, ...]  # the sequence of each choice of the answer
    top: int  # alternatives to report
    most: int  # tokens that each sequence may have
    deadline: float = math.inf  # on the monotonic clock
    rest: tuple[int, ...] = ()  # sequences that are requested afterwards
    limit: int = 0  # sequences that it may have, if the server gave no more

    @property
    def seed(self) -> int:
        """Its own seed: that of its first sequence."""
        return row_seed(self.request.seed, f"sequence {self.slots[0]}", self.slots[0])

    def split(self, limit: int) -> Exchange:
        """The same with the first `limit` sequences; the others are requested afterwards."""
        return replace(self, slots=self.slots[:limit], rest=(*self.slots[limit:], *self.rest), limit=limit)


@dataclass(frozen=True)
class Attempt:
    """The request is sent, for the first time or again."""


@dataclass(frozen=True)
class Answered:
    """All of the answer is there. `missing` are sequences that the server has left out."""

    usage: Usage | None
    counts: dict[int, Usage]  # of single choices
    missing: tuple[int, ...]


@dataclass(frozen=True)
class TooMany:
    """The server does not give so many sequences at once; it may give `limit`."""

    limit: int


Update: TypeAlias = Attempt | AnswerPiece | Answered | TooMany | TimedOut | ServerError | GenctlError


class Exchanges:
    """Sends requests and puts what happens into `updates`."""

    def __init__(self) -> None:
        self.updates: queue.SimpleQueue[tuple[Exchange, Update]] = queue.SimpleQueue()
        self.busy = 0  # requests in flight; counted by the caller's thread alone

    def send(self, exchange: Exchange) -> None:
        """Send a request. The caller limits the number of requests in flight."""
        self.busy += 1
        exchange.server.client.start(lambda: self._complete(exchange))

    def _complete(self, exchange: Exchange) -> None:
        """Send a request until it is answered. Its last update is neither an Attempt nor an AnswerPiece."""

        def report(update: Update) -> None:
            self.updates.put((exchange, update))

        try:
            pause, deadline = exchange.server.client.pause, exchange.deadline
            report(retry(lambda: _sent(exchange, report), pause, seed=exchange.seed, deadline=deadline))
        except (Disconnected, TimedOut):
            report(TimedOut())
        except (ServerError, GenctlError) as error:
            report(error)
        except Exception as error:  # whatever a server sends may cost its row, never the others
            report(ServerError(f"unexpected {type(error).__name__}: {one_line(str(error))}"))


def _sent(exchange: Exchange, report: Callable[[Update], None]) -> Answered | TooMany:
    """Send a request once, or again without what the server turns out to be unable to do. Raises ServerError."""
    report(Attempt())
    answer, server, count = _Attempt(exchange, report), exchange.server, len(exchange.slots)
    body = exchange.body(exchange.seed, count)
    try:
        server.client.stream(exchange.path, body, answer.take, sequences=count, deadline=exchange.deadline)
    except ServerError as error:
        if count > 1 and error.status in (400, 422):
            return TooMany(server.fewer_sequences(count))
        if server.learn(body, error):
            return _sent(exchange, report)
        raise
    return answer.result()


@dataclass
class _Attempt:
    """One attempt at an answer: takes its parts and checks them."""

    exchange: Exchange
    report: Callable[[Update], None]
    usage: Usage | None = None
    counts: dict[int, Usage] = field(default_factory=dict)  # of single choices, as llama-server reports them
    lengths: dict[int, int] = field(default_factory=dict)  # choice -> tokens so far
    begun: set[int] = field(default_factory=set)
    parts: int = 0
    ended: set[int] = field(default_factory=set)

    def take(self, part: dict[str, Any]) -> bool:
        """Report the pieces of a part. Returns whether all sequences have ended. Raises ServerError or Disconnected."""
        exchange, count = self.exchange, len(self.exchange.slots)
        if exchange.lane.is_over:
            raise Disconnected
        self.parts += 1
        if self.parts > max(PARTS * exchange.most, FEWEST) * count:
            raise ServerError(f"the stream does not end: it has {self.parts} parts for at most {exchange.most} tokens")
        doubts: set[str] = set()
        pieces = pieces_of(part, exchange.top, doubts)
        for piece in pieces:
            if piece.choice >= count:
                raise ServerError(f"the answer has more than {count} sequences")
            if piece.choice in self.ended:
                continue
            self.begun.add(piece.choice)
            piece = self._within(piece)
            self.report(piece)
            if piece.finish is not None:
                self.ended.add(piece.choice)
        if usage := usage_of(part, doubts):
            if count > 1 and len(pieces) == 1:
                self.counts[pieces[0].choice] = usage
            else:
                self.usage = usage
        for doubt in sorted(doubts):
            exchange.server.client.note(doubt)
        return len(self.ended) == count

    def _within(self, piece: AnswerPiece) -> AnswerPiece:
        """The piece without tokens beyond max_tokens, where the server lists its tokens."""
        if not piece.counted:
            return piece
        most, before = self.exchange.most, self.lengths.get(piece.choice, 0)
        left = most - before
        self.lengths[piece.choice] = before + min(left, len(piece.tokens))
        if len(piece.tokens) <= left:
            return piece
        if all(not token.text for token in piece.tokens[left:]):  # the end, which some servers list as a token
            return replace(piece, tokens=piece.tokens[:left])
        self.exchange.server.client.note(f"a text has more than max_tokens = {most} tokens and is cut")
        return replace(piece, tokens=piece.tokens[:left], finish="length", stop=None)

    def result(self) -> Answered:
        """The whole answer. Raises ServerError where a sequence was cut off, or none is there."""
        count = len(self.exchange.slots)
        if not self.ended or self.begun - self.ended:
            raise ServerError("the answer was cut off before its end", again=True)
        usage, most = self.usage, self.exchange.most * count
        if usage is not None and usage.new is not None and usage.new > most:
            if len(self.lengths) == count:  # a text that was cut here has as many tokens as were kept
                usage = replace(usage, new=sum(self.lengths.values()))
            else:
                self.exchange.server.client.note(f"it counts {usage.new} tokens for a request of at most {most}")
        missing = [slot for choice, slot in enumerate(self.exchange.slots) if choice not in self.ended]
        return Answered(usage, self.counts, tuple(missing))

"""Requests whose answers are read whole: a few in flight, outcomes in order, and log-probabilities of given tokens."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from typing import Any, TypeVar

from genctl.engines.server.answer import pieces_of, tokens_of
from genctl.engines.server.body import path_of
from genctl.engines.server.client import TICK_S
from genctl.engines.server.failure import Disconnected, RowFailure, ServerError, TimedOut, one_line, retry
from genctl.engines.server.server import REFUSED, Server
from genctl.errors import BackendError, GenctlError, InputError
from genctl.events import Token

Key = TypeVar("Key")
T = TypeVar("T")
TOPS = (20, 5)  # tokens of each distribution: the second where a server gives no more, as OpenAI's
LONGER = (1000, 1 << 18)  # lists in which a token is looked for, where a server gives such: llama-server all tokens
TOLERANCE = 0.1  # nats, between a token that is read and the same one that is written: passes differ a little


def in_order(
    servers: Sequence[Server],
    wanted: Iterable[tuple[Key, Callable[[Server], T]]],
    width: int,
    interrupted: Callable[[], object] = lambda: False,
) -> Iterator[tuple[Key, T | GenctlError]]:
    """One outcome for each row, in order; at most `width` are in flight. Raises BackendError where none can succeed."""
    incoming, turn = iter(wanted), itertools.cycle(servers)
    due: deque[tuple[Key, Future[T]]] = deque()
    while not interrupted():
        for key, work in itertools.islice(incoming, width - len(due)):
            server = next(turn)
            due.append((key, server.client.start(partial(work, server))))
        if not due:
            return
        key, future = due[0]
        try:
            outcome: T | GenctlError = future.result(TICK_S)
        except NotYet:
            continue
        except BackendError:
            raise
        except GenctlError as error:
            outcome = error
        finally:
            for server in servers:
                server.client.tick()
        due.popleft()
        yield key, outcome


def answered(server: Server, send: Callable[[], T], *, seed: int, deadline: float = math.inf, late: str = "") -> T:
    """What `send` returns, once it succeeds. Raises RowFailure, at the deadline with the words `late`; BackendError for
    trouble that ends the run; and what `send` raises on purpose.
    """
    try:
        return retry(send, server.client.pause, seed=seed, deadline=deadline)
    except ServerError as error:
        if error.fatal:
            raise server.error(error) from None
        raise RowFailure(f"{server.name}: {error.message}", hint=error.hint) from None
    except (TimedOut, Disconnected):
        raise RowFailure(f"{server.name}: {late}") from None
    except GenctlError:
        raise
    except Exception as error:  # whatever a server sends may cost its row, never the others
        raise RowFailure(f"{server.name}: unexpected {type(error).__name__}: {one_line(str(error))}") from error


def answers(
    servers: Sequence[Server], requests: Sequence[tuple[str, str, dict[str, Any]]], interrupted: Callable[[], object]
) -> Iterator[tuple[str, dict[str, Any] | GenctlError]]:
    """The answers to requests with log-probabilities: id, path and fields."""
    ask = ServerLogprobs(servers)

    def answer(path: str, fields: dict[str, Any], server: Server) -> dict[str, Any]:
        return ask.answer(server, path, fields)

    return in_order(servers, ((id, partial(answer, path, fields)) for id, path, fields in requests), 8, interrupted)


class ServerLogprobs:
    """Requests for log-probabilities. They list fewer tokens where a server gives no more."""

    def __init__(self, servers: Sequence[Server], most: int = TOPS[0]) -> None:
        """`most`: tokens that are listed of each distribution."""
        self._tops = dict.fromkeys(servers, most)

    def answer(
        self, server: Server, path: str, fields: Mapping[str, Any], deadline: float = math.inf, late: str = ""
    ) -> dict[str, Any]:
        """A checked answer with one choice. Raises RowFailure and BackendError."""
        key = "top_logprobs" if "top_logprobs" in fields else "logprobs"

        def send() -> dict[str, Any]:
            top = self._tops[server]
            try:
                answer = server.client.fetch(path, {"model": server.model, key: top, **fields}, deadline=deadline)
            except ServerError as error:
                if top <= TOPS[1] or fields.get(key) or error.status not in REFUSED:
                    raise
                self._tops[server] = TOPS[1]
                return send()
            if (count := len(pieces_of(answer, 0, set()))) != 1:
                raise ServerError(f"the answer has {count} sequences, not one")
            return answer

        return answered(server, send, seed=fields["max_tokens"], deadline=deadline, late=late)

    def written(self, server: Server, prompt: Sequence[int], ids: Sequence[int], **late: Any) -> list[Token]:
        """Tokens behind a prompt with the numbers that a server lists as it writes them itself (llama-server).

        It writes greedily. Where it writes another token, the given one is looked for in the list there, then in longer
        ones, and it continues behind it. NaN where no list has it.
        """
        found: list[Token] = []
        while len(found) < len(ids):
            behind, left = [*prompt, *ids[: len(found)]], ids[len(found) :]
            tokens = self._tokens(server, behind, len(left), None, late)
            pairs = zip(left, tokens, strict=False)
            agreed = [token for _, token in itertools.takewhile(lambda pair: pair[0] == pair[1].id, pairs)]
            found += agreed
            if len(agreed) == len(left):
                break
            id, one = left[len(agreed)], next(iter(tokens[len(agreed) :]), None)
            for longer in (None, *LONGER):
                if longer is not None:
                    one = next(iter(self._tokens(server, [*behind, *left[: len(agreed)]], 1, longer, late)), None)
                listed = [entry for entry in one.top if entry[0] == id] if one is not None else []
                if one is not None and listed:
                    found.append(Token(id, listed[0][2], rank=one.top.index(listed[0]) + 1, top=one.top))
                    break
            else:
                found.append(Token(id, math.nan))
        return found

    def _tokens(
        self, server: Server, prompt: Sequence[int], count: int, top: int | None, late: Mapping[str, Any]
    ) -> list[Token]:
        """The tokens of a greedy answer, with lists of `top` tokens; none where the server gives no such lists."""
        fields: dict[str, Any] = {"prompt": [*prompt], "max_tokens": count, "temperature": 0.0}
        fields |= {} if top is None else {"logprobs": top}
        try:
            answer = self.answer(server, path_of(chat=False), fields, **late)
        except RowFailure:
            if top is None or time.monotonic() >= late.get("deadline", math.inf):
                raise
            return []
        doubts: set[str] = set()
        found = tokens_of(answer["choices"][0].get("logprobs"), top or self._tops[server], doubts)
        if doubts:
            raise InputError(f"{server.name}: gives a log-probability that is not a number up to 0")
        if not found:
            raise RowFailure(f"{server.name}: the answer has no log-probabilities of its tokens")
        return found

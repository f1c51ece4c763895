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
from typing import Any, NamedTuple, TypeVar

from genctl.engines.server.answer import pieces_of, tokens_of
from genctl.engines.server.body import path_of
from genctl.engines.server.client import TICK_S
from genctl.engines.server.failure import Disconnected, RowFailure, ServerError, TimedOut, one_line, retry
from genctl.engines.server.server import REFUSED, Server
from genctl.errors import BackendError, GenctlError, InputError
from genctl.events import Token

Key = TypeVar("Key")
T = TypeVar("T")
IN_FLIGHT = 8  # requests of `answers`
LISTED = 5  # tokens of each distribution, where a server gives no more than OpenAI's
LONGER = (1000, 1 << 18)  # lists in which a token is looked for, where a server gives such: llama-server all tokens


class Limit(NamedTuple):
    """When requests are given up, on the monotonic clock, and the words of their error."""

    deadline: float = math.inf
    words: str = ""


UNLIMITED = Limit()


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


def answered(server: Server, send: Callable[[], T], *, seed: int, limit: Limit = UNLIMITED) -> T:
    """What `send` returns, once it succeeds. Raises RowFailure, BackendError for trouble that ends the run, and what
    `send` raises on purpose.
    """
    try:
        return retry(send, server.client.pause, seed=seed, deadline=limit.deadline)
    except ServerError as error:
        if error.fatal:
            raise server.error(error) from None
        raise RowFailure(f"{server.name}: {error.message}", hint=error.hint) from None
    except (TimedOut, Disconnected):
        raise RowFailure(f"{server.name}: {limit.words}") from None
    except GenctlError:
        raise
    except Exception as error:  # whatever a server sends may cost its row, never the others
        raise RowFailure(f"{server.name}: unexpected {type(error).__name__}: {one_line(str(error))}") from error


def answers(
    servers: Sequence[Server], requests: Sequence[tuple[str, str, dict[str, Any]]], interrupted: Callable[[], object]
) -> Iterator[tuple[str, dict[str, Any] | GenctlError]]:
    """The answers to requests with log-probabilities: id, path and fields."""
    rows = ((id, partial(answer_of, path=path, fields=fields)) for id, path, fields in requests)
    return in_order(servers, rows, IN_FLIGHT, interrupted)


def answer_of(server: Server, path: str, fields: Mapping[str, Any], limit: Limit = UNLIMITED) -> dict[str, Any]:
    """A checked answer with one choice. Raises RowFailure and BackendError.

    It lists as many tokens of each distribution as `fields` says, else as many as the server gives.
    """
    key = "top_logprobs" if "top_logprobs" in fields else "logprobs"

    def send() -> dict[str, Any]:
        top = server.most_listed
        try:
            answer = server.client.fetch(path, {"model": server.model, key: top, **fields}, deadline=limit.deadline)
        except ServerError as error:
            if top <= LISTED or fields.get(key) or error.status not in REFUSED:
                raise
            server.most_listed = LISTED
            return send()
        if (count := len(pieces_of(answer, 0, set()))) != 1:
            raise ServerError(f"the answer has {count} sequences, not one")
        return answer

    return answered(server, send, seed=fields["max_tokens"], limit=limit)


def written(server: Server, prompt: Sequence[int], ids: Sequence[int], limit: Limit) -> list[Token]:
    """Tokens behind a prompt with the numbers that a server lists as it writes them itself (llama-server).

    It writes greedily. Where it writes another token, the given one is looked for in the list there, then in longer
    ones, and it continues behind it. NaN where no list has it.
    """
    found: list[Token] = []
    while len(found) < len(ids):
        left = ids[len(found) :]
        tokens = _greedy(server, [*prompt, *ids[: len(found)]], len(left), None, limit)
        agreed = sum(itertools.takewhile(bool, (token.id == id for token, id in zip(tokens, left, strict=False))))
        found += tokens[:agreed]
        if agreed == len(left):
            break
        id, behind = left[agreed], [*prompt, *ids[: len(found)]]
        longer = (_greedy(server, behind, 1, top, limit) for top in LONGER)
        for one in itertools.chain.from_iterable(part[:1] for part in itertools.chain([tokens[agreed:]], longer)):
            if listed := [entry for entry in one.top if entry[0] == id]:
                found.append(Token(id, listed[0][2], rank=one.top.index(listed[0]) + 1, top=one.top))
                break
        else:
            found.append(Token(id, math.nan))
    return found


def _greedy(server: Server, prompt: Sequence[int], count: int, top: int | None, limit: Limit) -> list[Token]:
    """The tokens of a greedy answer, with lists of `top` tokens; none where the server gives no such lists."""
    fields: dict[str, Any] = {"prompt": [*prompt], "max_tokens": count, "temperature": 0.0}
    fields |= {} if top is None else {"logprobs": top}
    try:
        answer = answer_of(server, path_of(chat=False), fields, limit)
    except RowFailure:
        if top is None or time.monotonic() >= limit.deadline:
            raise
        return []
    doubts: set[str] = set()
    found = tokens_of(answer["choices"][0].get("logprobs"), top or server.most_listed, doubts)
    if doubts:
        raise InputError(f"{server.name}: gives a log-probability that is not a number up to 0")
    if not found:
        raise RowFailure(f"{server.name}: the answer has no log-probabilities of its tokens")
    return found

"""Requests whose answers are read whole: a few in flight, sent again where that may help, outcomes in order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeAlias, TypeVar

from genctl.engines.server import failure
from genctl.engines.server.client import TICK_S
from genctl.engines.server.failure import Late, RowFailure, Trouble, one_line
from genctl.engines.server.server import Server
from genctl.errors import BackendError, GenctlError

Key = TypeVar("Key")
T = TypeVar("T")
Work: TypeAlias = "Callable[[Server], Coroutine[Any, Any, T]]"  # a row, done by the server whose turn it is


def in_order(
    servers: Sequence[Server],
    wanted: Iterable[tuple[Key, Work[T]]],
    width: int,
    interrupted: Callable[[], object] = lambda: False,
) -> Iterator[tuple[Key, T | GenctlError]]:
    """One outcome for each row, in order; at most `width` are in flight. Raises BackendError where none can succeed."""
    incoming, turn = iter(wanted), itertools.cycle(servers)
    due: deque[tuple[Key, Future[T]]] = deque()

    def hear() -> None:
        for server in servers:
            server.client.hear()

    try:
        while not interrupted():
            for key, work in itertools.islice(incoming, width - len(due)):
                server = next(turn)
                due.append((key, server.client.start(work(server))))
            if not due:
                return
            hear()
            key, future = due[0]
            try:
                outcome: T | GenctlError = future.result(TICK_S)
            except NotYet:
                continue
            except BackendError:
                raise
            except GenctlError as error:
                outcome = error
            due.popleft()
            yield key, outcome
    finally:
        for _, future in due:
            future.cancel()
        hear()


async def patiently(
    server: Server, ask: Callable[[], Awaitable[T]], *, seed: int, deadline: float | None = None, late: str = ""
) -> T:
    """What `ask` returns, once it succeeds. Raises RowFailure, with the words `late` at the deadline; BackendError for
    trouble that ends the run; and what `ask` raises on purpose.
    """
    try:
        return await failure.patiently(ask, seed=seed, deadline=deadline, say=server.client.note_pause)
    except Trouble as trouble:
        if trouble.fatal:
            raise server.error(trouble) from None
        raise RowFailure(f"{server.name}: {trouble.message}") from None
    except Late:
        raise RowFailure(f"{server.name}: {late}") from None
    except GenctlError:
        raise
    except Exception as error:  # whatever a server sends may cost its row, never the others
        words = f"unexpected {type(error).__name__}: {one_line(str(error))}"
        raise RowFailure(f"{server.name}: {words}") from error

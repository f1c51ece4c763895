"""`genctl score` on servers: they echo a text with its log-probabilities."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from typing import Any, TypeVar

from genctl.backend import retry
from genctl.backend.echo import EchoedPrompt, echoed, scored_after
from genctl.backend.failure import BackendError, RowFailure, Trouble
from genctl.backend.server import Server
from genctl.backend.session import TICK_S, RemoteSession
from genctl.errors import GenctlError, InputError, UsageError
from genctl.scoring.scored_text import By, Scored, TextToScore, goodness

Key = TypeVar("Key")


class RemoteScorer:
    """Scores texts on servers. Raises BackendError where they cannot, UsageError for options that they lack."""

    findings: tuple[str, ...] = ()

    def __init__(self, session: RemoteSession, *, by: By, top: int, width: int, unable: Sequence[str] = ()) -> None:
        """`unable`: flags that are set and that no server has. `width`: requests in flight."""
        if unable:
            raise UsageError(f"{' and '.join(unable)} cannot be done on a server, which reads each text as it is")
        for server in session.servers:
            if why := server.why_no_prompt_scores():
                raise BackendError(f"{server.name}: genctl score needs prompt log-probabilities, but the server {why}")
        self.name = session.name
        self._by, self._top, self._width = by, top, width
        self._turn = itertools.cycle(session.servers)

    def score(
        self, wanted: Iterable[tuple[Key, TextToScore]], interrupted: Callable[[], object] = lambda: False
    ) -> Iterator[tuple[Key, list[Scored] | GenctlError]]:
        """As `Scorer.score`: one outcome for each text, in order. Raises BackendError where none can succeed."""
        incoming = iter(wanted)
        due: deque[tuple[Key, Future[list[Scored]]]] = deque()
        while not interrupted():
            for key, text in itertools.islice(incoming, self._width - len(due)):
                due.append((key, _begun(partial(self._scored, text, next(self._turn)))))
            if not due:
                return
            key, future = due[0]
            try:
                outcome: list[Scored] | GenctlError = future.result(TICK_S)
            except NotYet:
                continue
            except BackendError:
                raise
            except GenctlError as error:
                outcome = error
            due.popleft()
            yield key, outcome

    def _scored(self, item: TextToScore, server: Server) -> list[Scored]:
        """A text, or its candidates, best first. Raises InputError, or BackendError for trouble that ends the run."""
        if item.target is not None:
            raise InputError("a target is for encoder-decoders, and a server continues texts")
        if not item.candidates:
            return [self._one(item.context or "", item.text, server)]
        if not item.context:
            raise InputError("candidates need a context: the server has no score for the first token of a text")
        found = []
        for place, candidate in enumerate(item.candidates, 1):
            try:
                found.append(dataclasses.replace(self._one(item.context, candidate, server), candidate=place - 1))
            except InputError as error:
                raise InputError(f"candidate {place}: {error.message}") from error
        found.sort(key=lambda one: goodness(one, self._by), reverse=True)
        return [dataclasses.replace(one, rank=rank) for rank, one in enumerate(found, 1)]

    def _one(self, context: str, text: str, server: Server) -> Scored:
        whole = context + text
        body = {"model": server.model, "prompt": whole, "max_tokens": 1, "temperature": 0.0, "echo": True}
        path = server.endpoint(chat=False).path
        for attempt in itertools.count(1):
            try:
                answer = server.client.post(path, {**body, "logprobs": max(self._top, 1)})
                prompt = _prompt_of(answer, whole, self._top)
                break
            except Trouble as trouble:
                if trouble.fatal:
                    raise server.error(trouble) from None
                if not trouble.again or attempt == retry.ATTEMPTS:
                    more = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise RowFailure(f"{server.name}: {trouble.message}{more}") from None
                time.sleep(retry.pause_s(attempt, len(whole), trouble.wait_s))
        first, tokens = scored_after(prompt, len(context))
        return Scored(
            text,
            (),
            math.fsum(-token.logprob for token in tokens) + 0.0,
            len(tokens),
            len(whole[first:].encode("utf-8")),
            tuple(tokens),
            whole[len(context) : first],
            backend=server.name,
        )


def _begun(work: Callable[[], list[Scored]]) -> Future[list[Scored]]:
    """The result of `work`, which a thread does that ends with the process: nobody waits for a silent server."""
    future: Future[list[Scored]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="score", daemon=True).start()
    return future


def _prompt_of(answer: Any, text: str, top: int) -> EchoedPrompt:
    """The echoed prompt. Raises Trouble where the answer has none."""
    try:
        return echoed(answer, text, top)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise Trouble("the answer does not echo the prompt with its log-probabilities", again=True) from None

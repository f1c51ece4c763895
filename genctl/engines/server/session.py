"""Servers in place of a checkpoint.

A row becomes one request, or several if the server returns fewer sequences at once.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from genctl import events
from genctl.config.layers import Layer, Resolved, resolve
from genctl.engines import protocol
from genctl.engines.protocol import ALONE, About, EngineSetup, Flow, JobPlan, Key, Report, Request, Rows, WorkDone
from genctl.engines.server.body import sampling_fields
from genctl.engines.server.client import TICK_S, read
from genctl.engines.server.row import RemoteRow, Update
from genctl.engines.server.server import IN_FLIGHT, Server, score
from genctl.errors import BackendError, GenctlError, UsageError

if TYPE_CHECKING:
    from genctl.engines.protocol import Outcome, ScoringOptions, TextToScore
    from genctl.models.tokenizer_alone import LoneTokenizer

GRACE_S = 2.0  # for rows to report their results so far after an interrupt
NOT_SCORED = ("add_eos", "stride", "window", "target")  # scoring options that need a tokenizer or an encoder here


class RemoteSession:
    """One or several servers, ready for requests. Rows are distributed round-robin."""

    done = WorkDone()  # servers report no work

    def __init__(self, setup: EngineSetup) -> None:
        """Connect to the servers. With a tokenizer, prompts are tokenised here; without one, by the server.

        Raises BackendError if a server cannot be used, UsageError for an invalid address, ModelError for the tokenizer.
        """
        runtime, self._live = setup.runtime, setup.live
        assert runtime.backend is not None
        self._tokenizer: LoneTokenizer | None = None
        if runtime.tokenizer is not None:
            from genctl.models.tokenizer_alone import LoneTokenizer

            self._tokenizer = LoneTokenizer(runtime.tokenizer)
        self.servers: list[Server] = []
        try:
            for address in read(runtime.backend):
                self.servers.append(Server(address, runtime.model if setup.named else None, setup.note))
            if len({server.model for server in self.servers}) > 1:
                each = "; ".join(f"{server.name} has {server.model}" for server in self.servers)
                raise BackendError(f"the servers have different models: {each}", hint="name one with --model")
        except BaseException:  # also on Ctrl-C, close the open connections
            self.close()
            raise
        facts = tuple(("server", server.name) for server in self.servers)
        self.about = About(self.servers[0].model, remote=True, facts=facts)
        self._turn = itertools.cycle(self.servers)

    def notes(self) -> list[str]:
        """Notes for --verbose: each server with its model."""
        return [f"{one.name}: {one.model}" + (f" ({one.owner})" if one.owner else "") for one in self.servers]

    def fingerprints(self) -> dict[str, str]:
        """Empty: servers do not identify their weights. The journal has the server's address and the model's name."""
        return {}

    def resolve(self, layers: Sequence[Layer]) -> Resolved:
        """The layers, with the server's model beneath them."""
        return resolve([Layer(self.servers[0].name, {"model": self.about.name}, declared="user"), *layers])

    def plan(self, resolved: Resolved) -> JobPlan:
        """Check whether the servers can do a job (`Engine.plan`). Raises BackendError or UsageError."""
        chat = resolved.runtime.is_chat
        each = ((one.name, sampling_fields(resolved, one.owner, chat=chat)[1]) for one in self.servers)
        if problems := [f"{name}: {words}" for name, all_words in each for words in all_words]:
            raise BackendError("\n".join(problems))

        def without_logprobs() -> str:
            able = ((one.name, one.client.wait(partial(one.can, "logprobs", chat=chat))) for one in self.servers)
            return next((name for name, can in able if not can), "")

        return JobPlan("sample" if resolved.generation.draws else "greedy", without_logprobs=without_logprobs)

    def watched(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """Raises UsageError for any tokens: servers do not report tokens that were not chosen."""
        if tokens:
            raise UsageError(f"--watch {tokens[0]}: a server reports no tokens that were not chosen")
        return ()

    def width(self, resolved: Resolved, default: int) -> int:
        """The maximum number of requests in flight. Raises UsageError for batch_size = auto."""
        size = resolved.runtime.batch_size
        if size == "auto":
            words = "batch_size = auto measures memory here, but the model is on a server"
            raise UsageError(words, hint="give a number")
        return min(default, IN_FLIGHT) if size is None else int(size)

    def use_threads(self, rows: int, recorded: int | None = None) -> int | None:
        """None: servers choose their own threads."""

    def close(self, *, hurried: bool = False, failed: bool = False) -> None:
        """Close all connections."""
        for server in self.servers:
            server.client.close()

    def score(
        self,
        texts: Iterator[tuple[Key, TextToScore]],
        options: ScoringOptions,
        *,
        interrupted: Callable[[], str] = protocol.never,
    ) -> Iterator[tuple[Key, Outcome]]:
        """The outcome of each text, in order. Raises UsageError or BackendError at once if servers cannot do it."""
        refused = [f"--{name.replace('_', '-')}" for name in NOT_SCORED if getattr(options, name)]
        if refused := [*refused, *(["--tokenizer"] if self._tokenizer is not None else [])]:
            raise UsageError(f"{' and '.join(refused)} cannot be done on a server, which reads each text as it is")
        return score(self.servers, texts, options, interrupted)

    def stream(
        self, requests: Rows, report: Report | None = None, flow: Flow = ALONE
    ) -> Generator[events.Event, None, None]:
        """See `Engine.stream`; at most `flow.width` requests are in flight. Raises BackendError if none can succeed.

        Rows do not depend on each other, so all are one group; memory is left to the server.
        """
        updates, stop = queue.SimpleQueue[Update](), threading.Event()
        incoming = (request for request in requests if isinstance(request, Request))
        busy, reading, until = 0, True, math.inf
        try:
            while (busy or reading) and time.monotonic() < until:
                if flow.interrupted():
                    reading, until = False, min(until, time.monotonic() + GRACE_S)
                    stop.set()
                while reading and busy < flow.width and not flow.interrupted():
                    if (request := next(incoming, None)) is None:
                        reading = False
                        break
                    server = next(self._turn)
                    own = (request, server, report or Report(), self._tokenizer, self._live, updates.put)
                    server.client.start(RemoteRow(*own, stop, flow.interrupted).run)
                    busy += 1
                self._tick(stop)
                try:
                    update = updates.get(timeout=TICK_S)
                except queue.Empty:
                    continue
                if isinstance(update, GenctlError):
                    raise update
                if update is None:
                    busy -= 1
                else:
                    yield update
        finally:
            stop.set()
            self._tick(stop)

    def _tick(self, stop: threading.Event) -> None:
        """Report notes, and end requests past their deadline; after `stop`, end all."""
        for server in self.servers:
            server.client.tick()
            if stop.is_set():
                server.client.shut()

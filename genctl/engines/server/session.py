"""Servers in place of a checkpoint.

A row becomes one request, or several where the server gives fewer sequences at once.
"""

from __future__ import annotations

import itertools
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from genctl import events
from genctl.config.layers import Layer, Resolved, resolve
from genctl.engines.protocol import (
    ALONE,
    About,
    EngineSetup,
    Flow,
    JobPlan,
    Key,
    Report,
    Request,
    Rows,
    WorkDone,
    never,
)
from genctl.engines.server import address
from genctl.engines.server.answer import AnswerPiece
from genctl.engines.server.body import SEEDS, messages_of, path_of, sampling_fields
from genctl.engines.server.client import TICK_S
from genctl.engines.server.exchange import Answered, Attempt, Exchange, Exchanges, TooMany, Update
from genctl.engines.server.failure import RowFailure, ServerError, TimedOut, one_line
from genctl.engines.server.lane import RemoteLane
from genctl.engines.server.server import Server, logprob_fields
from genctl.errors import BackendError, GenctlError, InputError, UsageError
from genctl.params import DEFAULT_NEW_TOKENS

if TYPE_CHECKING:
    from genctl.engines.protocol import Outcome, ScoringOptions, TextToScore
    from genctl.models.tokenizer_alone import LoneTokenizer

IN_FLIGHT = 8  # requests, where batch_size does not say
UNABLE = ("add_eos", "stride", "window", "target")  # options of scoring that need the tokenizer, or an encoder


class RemoteSession:
    """One or several servers, ready for requests. Rows are spread over them in turn."""

    done = WorkDone()  # as far as servers report it

    def __init__(
        self,
        backend: str | Sequence[str],
        model: str | None,
        tokenizer: str | None = None,
        note: Callable[[str], object] = lambda line: None,
        *,
        live: bool = False,
    ) -> None:
        """`tokenizer`: the checkpoint whose tokenizer makes token ids of prompts; None leaves that to the server.

        `note` reports waits, and answers that are not as they should be, a line for each. `live`: pieces become events
        as they come. Raises BackendError where a server cannot be used, UsageError for what names none, ModelError for
        the tokenizer.
        """
        self._tokenizer: LoneTokenizer | None = None
        if tokenizer is not None:
            from genctl.models.tokenizer_alone import LoneTokenizer

            self._tokenizer = LoneTokenizer(tokenizer)
        self.servers: list[Server] = []
        try:
            for one in address.read(backend):
                self.servers.append(Server(one, model, note))
            if len({server.model for server in self.servers}) > 1:
                each = "; ".join(f"{server.name} has {server.model}" for server in self.servers)
                raise BackendError(f"the servers have different models: {each}", hint="name one with --model")
        except BaseException:  # Ctrl-C too: connections that are open are closed
            self.close()
            raise
        self.about = About(
            self.servers[0].model, remote=True, facts=tuple(("server", server.name) for server in self.servers)
        )
        self._live = live
        self._turn = itertools.cycle(self.servers)

    def notes(self) -> list[str]:
        """Notes for --verbose: each server with its model."""
        return [f"{one.name}: {one.model}" + (f" ({one.kind})" if one.kind else "") for one in self.servers]

    def fingerprints(self) -> dict[str, str]:
        """No server reports which weights it has: the journal knows its address and the name of its model."""
        return {}

    def resolve(self, layers: Sequence[Layer]) -> Resolved:
        """The layers, with the server's model beneath them."""
        return resolve([Layer(self.servers[0].name, {"model": self.about.name}, said="user"), *layers])

    def plan(self, resolved: Resolved) -> JobPlan:
        """Check once whether the servers can do a job (`Engine.plan`). Raises BackendError or UsageError."""
        chat = resolved.runtime.is_chat
        problems = [f"{one.name}: {words}" for one in self.servers for words in _fields(one, resolved, chat=chat)[1]]
        if problems:
            raise BackendError("\n".join(problems))

        def without_logprobs() -> str:
            for server in self.servers:
                try:
                    if not server.client.wait(partial(server.can, "logprobs", chat=chat)):
                        return server.name
                except ServerError as error:
                    raise server.error(error, plain=not chat) from None
            return ""

        return JobPlan("sample" if resolved.generation.draws else "greedy", without_logprobs=without_logprobs)

    def watched(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """No server reports tokens that were not chosen. Raises UsageError."""
        if tokens:
            raise UsageError(f"--watch {tokens[0]}: a server reports no tokens that were not chosen")
        return ()

    def width(self, resolved: Resolved, default: int) -> int:
        """The bound on requests in flight. Raises UsageError."""
        size = resolved.runtime.batch_size
        if size == "auto":
            raise UsageError(
                "batch_size = auto measures memory here, but the model is on a server", hint="give a number"
            )
        return min(default, IN_FLIGHT) if size is None else int(size)

    def use_threads(self, rows: int, recorded: int | None = None) -> int | None:
        """None: servers choose for themselves."""

    def close(self, *, hurried: bool = False, failed: bool = False) -> None:
        """Close all connections."""
        for server in self.servers:
            server.close()

    def score(
        self,
        texts: Iterator[tuple[Key, TextToScore]],
        options: ScoringOptions,
        *,
        interrupted: Callable[[], str] = never,
    ) -> Iterator[tuple[Key, Outcome]]:
        """The outcome of each text, in order. Raises UsageError or BackendError at once for what servers cannot do."""
        from genctl.engines.server.scorer import RemoteScorer

        unable = [f"--{name.replace('_', '-')}" for name in UNABLE if getattr(options, name)]
        unable += ["--tokenizer"] if self._tokenizer is not None else []
        return RemoteScorer(self.servers, options, unable).score(texts, interrupted)

    def stream(
        self, requests: Rows, report: Report | None = None, flow: Flow = ALONE
    ) -> Generator[events.Event, None, None]:
        """As `Engine.stream`: at most `flow.width` requests are in flight. Raises BackendError where none can succeed.

        No row depends on those beside it, so all are one group, and memory is the server's own concern.
        """
        exchanges, waiting = Exchanges(), deque[Exchange]()
        incoming = (request for request in requests if isinstance(request, Request))
        lanes: dict[str, RemoteLane] = {}
        reading = True
        try:
            while True:
                if reason := flow.interrupted():
                    for lane in lanes.values():
                        if lane.has_text:
                            yield from lane.finish(reason)
                    return
                while exchanges.busy < flow.width and (waiting or reading) and not flow.interrupted():
                    if waiting:
                        exchanges.send(waiting.popleft())
                    elif (request := next(incoming, None)) is None:
                        reading = False
                    else:
                        waiting += yield from self._begun(request, report or Report(), lanes)
                if not (exchanges.busy or waiting or reading):
                    return
                for server in self.servers:
                    server.client.tick()
                try:
                    exchange, update = exchanges.updates.get(timeout=TICK_S)
                except queue.Empty:
                    continue
                if not isinstance(update, (Attempt, AnswerPiece)):
                    exchanges.busy -= 1
                if not exchange.lane.is_over:
                    waiting.extendleft((yield from _events_of(exchange, update)))
                if exchange.lane.is_over:
                    lanes.pop(exchange.lane.name, None)
                    waiting = deque(one for one in waiting if not one.lane.is_over)
        finally:
            for lane in lanes.values():
                lane.is_over = True
            for server in self.servers:
                server.client.tick()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _begun(
        self, request: Request, report: Report, lanes: dict[str, RemoteLane]
    ) -> Generator[events.Event, None, list[Exchange]]:
        """Begin a row; its requests. A row that the server cannot do fails at once."""
        server, resolved = next(self._turn), request.resolved
        generation = resolved.generation
        settings: dict[str, Any] = {
            "num_return_sequences": generation.num_return_sequences,
            "length_penalty": generation.length_penalty,
            "backend": server.name,
        } | ({"structure": generation.structure} if generation.structure else {})
        prompt = request.prompt or "\n".join(message.get("content") or "" for message in request.messages or ())
        shown = ""
        if request.messages is not None or resolved.runtime.is_chat:
            shown = events.conversation(messages_of(request.prompt, request.messages, resolved.runtime.system))
        kind, seed = ("sample", request.seed) if generation.draws else ("greedy", None)
        yield events.Began(
            request.id, prompt, kind, server.model, seed, settings, request.place, shown=shown, run=request.run,
            prompt_ids=request.prompt_ids or (),
        )  # fmt: skip
        try:
            exchanges = self._planned(request, report, server)
        except GenctlError as error:
            yield events.Failed(request.id, error.code, error.message)
            return []
        lanes[request.id] = exchanges[0].lane
        return exchanges

    def _planned(self, request: Request, report: Report, server: Server) -> list[Exchange]:
        """The requests of a row. Raises GenctlError for what the server cannot do."""
        resolved = request.resolved
        generation, runtime = resolved.generation, resolved.runtime
        chat = runtime.is_chat or request.messages is not None
        fields = server.fields(chat=chat)
        chosen, problems = _fields(server, resolved, chat=chat)
        if problems:
            raise RowFailure(f"{server.name}: " + "; ".join(problems))
        if chat and request.prompt_ids is not None:
            raise InputError("token ids cannot be sent as a chat: the server makes the ids of its own template")
        fixed: dict[str, Any] = {"model": server.model, **chosen, "stream": True}
        fixed |= {"stream_options": {"include_usage": True}} if "stream_options" in fields else {}
        fixed |= {"return_token_ids": True} if "return_token_ids" in fields else {}
        if chat:
            fixed["messages"] = messages_of(request.prompt, request.messages, runtime.system)

        def body(seed: int, count: int) -> dict[str, Any]:
            own = fixed if chat else {**fixed, "prompt": self._prompt(request, server)}
            own = own | ({"seed": seed % SEEDS} if "seed" in fields and generation.draws else {})
            own |= {"n": count} if count > 1 else {}
            return own | (logprob_fields(report.top, chat=chat) if server.may("logprobs", chat=chat) else {})

        count = generation.num_return_sequences
        limits = [one for one in (generation.max_time, runtime.row_timeout) if one is not None]
        whole = Exchange(
            request,
            RemoteLane(request, count, live=self._live),
            server,
            path_of(chat=chat),
            body,
            slots=tuple(range(count)),
            top=report.top,
            most=generation.max_new_tokens or DEFAULT_NEW_TOKENS,
            deadline=time.monotonic() + min(limits) if limits else math.inf,
        )
        size = min(count, server.most_sequences if "n" in fields else 1)
        return [replace(whole, slots=whole.slots[first : first + size]) for first in range(0, count, size)]

    def _prompt(self, request: Request, server: Server) -> str | list[int]:
        """A plain prompt as it is sent: as ids where there are any and the server takes them, else as text."""
        tokenizer, ids, takes_ids = self._tokenizer, request.prompt_ids, server.may("ids")
        if ids is None:
            text = request.prompt or ""
            return tokenizer.ids(text) if tokenizer is not None and takes_ids else text
        if takes_ids:
            return list(ids)
        if tokenizer is None:
            raise InputError(f"{server.name} takes no token ids as a prompt; --tokenizer makes a text of them")
        return tokenizer.text(ids)


def _fields(server: Server, resolved: Resolved, *, chat: bool) -> tuple[dict[str, Any], list[str]]:
    return sampling_fields(resolved, server.fields(chat=chat), chat=chat, kind=server.kind)


def _events_of(exchange: Exchange, update: Update) -> Generator[events.Event, None, list[Exchange]]:
    """The events of what happened to a request; the request that follows it. Raises BackendError that ends the run."""
    lane, server = exchange.lane, exchange.server
    try:
        if isinstance(update, Attempt):
            lane.again(exchange.slots, exchange.seed)
        elif isinstance(update, AnswerPiece):
            yield from lane.take(exchange.slots[update.choice], update)
        elif isinstance(update, TooMany):
            return [exchange.split(update.limit)]
        elif isinstance(update, Answered):
            lane.count(exchange.slots, update.usage)
            for choice, usage in update.counts.items():
                lane.count(exchange.slots[choice : choice + 1], usage)
            if exchange.limit:
                server.most_sequences = min(server.most_sequences, exchange.limit)
            if follow := (*update.missing, *exchange.rest):
                given = len(exchange.slots) - len(update.missing)
                return [replace(exchange, slots=follow, rest=()).split(exchange.limit or given)]
            if lane.is_complete:
                yield from lane.finish()
        elif isinstance(update, TimedOut):
            yield from lane.finish("time")
        elif isinstance(update, ServerError) and update.fatal:
            raise server.error(update, plain=not exchange.path.startswith("/chat"))
        elif isinstance(update, ServerError):
            yield from lane.fail(f"{server.name}: {update.message}", update.hint)
        elif isinstance(update, BackendError):
            raise update
        else:
            lane.is_over = True
            yield events.Failed(lane.name, update.code, update.message, update.hint)
    except ServerError as error:  # what came contradicts what was shown
        yield from lane.fail(f"{server.name}: {error.message}")
    except GenctlError:
        raise
    except Exception as error:  # whatever a server sends may cost its row, never the others
        yield from lane.fail(f"{server.name}: unexpected {type(error).__name__}: {one_line(str(error))}")
    return []


def load_servers(setup: EngineSetup) -> RemoteSession:
    """Reach the servers. Raises BackendError, UsageError or ModelError."""
    runtime = setup.runtime
    assert runtime.backend is not None
    model = runtime.model if setup.named else None
    return RemoteSession(runtime.backend, model, runtime.tokenizer, setup.note, live=setup.live)

"""Servers in place of a checkpoint.

A row becomes one request, or one for each of its sequences where the server gives a single one at a time.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
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
from genctl.engines.server.body import messages_of, sampling_fields, seed_field, unused_default
from genctl.engines.server.exchanges import Answered, Attempt, Exchange, Exchanges, News
from genctl.engines.server.failure import Late, RowFailure, Trouble, one_line
from genctl.engines.server.lane import RemoteLane
from genctl.engines.server.server import Endpoint, Server, logprob_fields
from genctl.errors import BackendError, GenctlError, InputError, UsageError
from genctl.io.rows import row_seed
from genctl.params import DEFAULT_NEW_TOKENS, Generation

if TYPE_CHECKING:
    from genctl.engines.protocol import Outcome, ScoringOptions, TextToScore
    from genctl.models.tokenizer_alone import LoneTokenizer

IN_FLIGHT = 8  # requests, where batch_size does not say
UNABLE = ("add_eos", "stride", "window", "target")  # options of scoring that need the tokenizer, or an encoder
TICK_S = 0.1  # between two looks at whether the run was interrupted


class RemoteSession:
    """One or several servers, ready to be asked. Rows are spread over them in turn."""

    done = WorkDone()  # as far as servers tell

    def __init__(
        self,
        backend: str | Sequence[str],
        model: str | None,
        tokenizer: str | None = None,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`tokenizer`: the checkpoint whose tokenizer makes token ids of prompts; None leaves that to the server.

        `say` reports waits, and answers that are not as they should be, a line for each.
        Raises BackendError where a server cannot be used, UsageError for what names none, ModelError for the tokenizer.
        """
        self._tokenizer: LoneTokenizer | None = None
        if tokenizer is not None:
            from genctl.models.tokenizer_alone import LoneTokenizer

            self._tokenizer = LoneTokenizer(tokenizer)
        self.servers: list[Server] = []
        try:
            for one in address.read(backend):
                self.servers.append(Server(one, model, say))
            if len({server.model for server in self.servers}) > 1:
                each = "; ".join(f"{server.name} has {server.model}" for server in self.servers)
                raise BackendError(f"the servers have different models: {each}", hint="name one with --model")
        except BaseException:  # Ctrl-C too: connections that are open are closed
            self.close()
            raise
        self.about = About(
            self.servers[0].model, remote=True, facts=tuple(("server", server.name) for server in self.servers)
        )
        self.live = False  # pieces are told of as they come
        self._turn = itertools.cycle(self.servers)

    def notes(self) -> list[str]:
        """Notes for --verbose: each server with its model."""
        return [f"{one.name}: {one.model}" + (f" ({one.kind})" if one.kind else "") for one in self.servers]

    def fingerprints(self) -> dict[str, str]:
        """No server says which weights it has: the journal knows its address and the name of its model."""
        return {}

    def resolve(self, layers: Sequence[Layer]) -> Resolved:
        """The layers, with the server's model beneath them."""
        return resolve([Layer(self.servers[0].name, {"model": self.about.name}, said="user"), *layers])

    def plan(self, resolved: Resolved) -> JobPlan:
        """Check once whether the servers can do a job (`Engine.plan`). Raises BackendError or UsageError."""
        problems, remarks, silent = [], [], []
        for server in self.servers:
            endpoint = server.endpoint(chat=resolved.runtime.is_chat)
            problems += [f"{server.name}: {words}" for words in self._fields(server, endpoint, resolved)[1]]
            if note := unused_default(resolved, endpoint.fields):
                remarks.append(f"{server.name}: {note}")
            if not endpoint.logprobs:
                silent.append(server.name)
        if problems:
            raise BackendError("\n".join(problems))
        kind = "sample" if resolved.generation.draws else "greedy"
        return JobPlan(kind, remarks=tuple(remarks), without_logprobs=silent[0] if silent else "")

    def watched(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """No server tells of tokens that were not chosen. Raises UsageError."""
        if tokens:
            raise UsageError(f"--watch {tokens[0]}: a server tells nothing of tokens that were not chosen")
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

    def hear(self) -> None:
        """Report what there is to say of the servers."""
        for server in self.servers:
            server.client.hear()

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
        exchanges = Exchanges()
        incoming = (request for request in requests if isinstance(request, Request))
        waiting: deque[Exchange] = deque()
        lanes: dict[str, RemoteLane] = {}
        reading = True
        try:
            while True:
                if reason := flow.interrupted():
                    for lane in lanes.values():
                        if lane.has_text:
                            yield from lane.finish(reason)
                    return
                while exchanges.busy < flow.width and (waiting or reading):
                    if not waiting:
                        request = next(incoming, None)
                        if request is None:
                            reading = False
                            break
                        waiting += yield from self._begun(request, report or Report(), lanes)
                    elif flow.interrupted():
                        break
                    else:
                        exchanges.send(waiting.popleft())
                if not (exchanges.busy or waiting or reading):
                    return
                self.hear()
                try:
                    exchange, news = exchanges.news.get(timeout=TICK_S)
                except queue.Empty:
                    continue
                if not isinstance(news, (Attempt, AnswerPiece)):
                    exchanges.busy -= 1
                if not exchange.lane.over:
                    yield from _events_of(exchange, news)
                if exchange.lane.over:
                    lanes.pop(exchange.lane.name, None)
                    waiting = deque(one for one in waiting if not one.lane.over)
        finally:
            exchanges.close()
            self.hear()
            for lane in lanes.values():
                lane.over = True

    # -- requests ------------------------------------------------------------------------------------------------------

    def _begun(
        self, request: Request, report: Report, lanes: dict[str, RemoteLane]
    ) -> Generator[events.Event, None, list[Exchange]]:
        """Begin a row; its requests. A row that the server cannot do fails at once."""
        server = next(self._turn)
        resolved = request.resolved
        kind = "sample" if resolved.generation.draws else "greedy"
        settings = _settings(resolved.generation, server.name)
        prompt = request.prompt or "\n".join(message.get("content") or "" for message in request.messages or ())
        shown = ""
        if request.messages is not None or resolved.runtime.is_chat:
            shown = events.conversation(messages_of(request.prompt, request.messages, resolved.runtime.system))
        seed = request.seed if resolved.generation.draws else None
        yield events.Began(
            request.id, prompt, kind, server.model, seed, settings, request.place, shown=shown, run=request.run,
            prompt_ids=request.prompt_ids or (),
        )  # fmt: skip
        try:
            lane, exchanges = self._planned(request, report, server)
        except GenctlError as error:
            yield events.Failed(request.id, error.code, error.message)
            return []
        lanes[lane.name] = lane
        return exchanges

    def _planned(self, request: Request, report: Report, server: Server) -> tuple[RemoteLane, list[Exchange]]:
        resolved = request.resolved
        generation = resolved.generation
        chat = resolved.runtime.is_chat or request.messages is not None
        endpoint = server.endpoint(chat=chat)
        chosen, problems = self._fields(server, endpoint, resolved)
        if problems:
            raise RowFailure(f"{server.name}: " + "; ".join(problems))
        body: dict[str, Any] = {"model": server.model}
        if chat:
            if request.prompt_ids is not None:
                raise InputError("token ids cannot be sent as a chat: the server makes the ids of its own template")
            body["messages"] = messages_of(request.prompt, request.messages, resolved.runtime.system)
        else:
            body["prompt"] = self._prompt(request, server)
        body |= {**chosen, "stream": True, **self._reported(endpoint, report, chat=chat)}
        count = generation.num_return_sequences
        together = count == 1 or ("n" in endpoint.fields and server.gives_several)
        lane = RemoteLane(request, count, live=self.live)
        limits = [one for one in (generation.max_time, resolved.runtime.row_timeout) if one is not None]
        deadline = time.monotonic() + min(limits) if limits else None
        exchanges = []
        for first in [0] if together else range(count):
            seed = row_seed(request.seed, f"sequence {first}", first)
            own = {**body, **seed_field(seed, endpoint.fields, generation)}
            if together and count > 1:
                own["n"] = count
            slots = tuple(range(count)) if together else (first,)
            most = generation.max_new_tokens or DEFAULT_NEW_TOKENS
            exchanges.append(Exchange(lane, server, endpoint.path, own, slots, seed, report.top, most, deadline))
        return lane, exchanges

    def _prompt(self, request: Request, server: Server) -> str | list[int]:
        """A plain prompt as it is sent: as ids where there are any and the server takes them, else as text."""
        tokenizer, ids = self._tokenizer, request.prompt_ids
        if ids is None:
            text = request.prompt or ""
            return tokenizer.ids(text) if tokenizer is not None and server.takes_ids else text
        if server.takes_ids:
            return list(ids)
        if tokenizer is None:
            raise InputError(f"{server.name} takes no token ids as a prompt; --tokenizer makes a text of them")
        return tokenizer.text(ids)

    @staticmethod
    def _fields(server: Server, endpoint: Endpoint, resolved: Resolved) -> tuple[dict[str, Any], list[str]]:
        chat = endpoint.path.startswith("/chat")
        chosen, problems = sampling_fields(resolved, endpoint.fields, chat=chat, kind=server.kind)
        seed = resolved.runtime.seed
        if seed is not None and resolved.generation.draws and "seed" not in endpoint.fields:
            problems.append(
                f"seed = {seed} ({resolved.origins.get('seed', 'default')}): the server has no field for it"
            )
        return chosen, problems

    @staticmethod
    def _reported(endpoint: Endpoint, report: Report, *, chat: bool) -> dict[str, Any]:
        """The fields that say what the answer tells of its tokens."""
        asked: dict[str, Any] = {}
        if "stream_options" in endpoint.fields:
            asked["stream_options"] = {"include_usage": True}
        if "return_token_ids" in endpoint.fields:
            asked["return_token_ids"] = True
        return asked | (logprob_fields(report.top, chat=chat) if endpoint.logprobs else {})


def _events_of(exchange: Exchange, news: News) -> Iterator[events.Event]:
    """The events of what happened to a request. Raises BackendError for trouble that ends the run."""
    lane = exchange.lane
    try:
        if isinstance(news, Attempt):
            lane.again(exchange.slots)
        elif isinstance(news, AnswerPiece):
            yield from lane.take(exchange.slots[news.choice], news)
        elif isinstance(news, Answered):
            lane.count(exchange.slots, news.usage)
            if lane.is_complete:
                yield from lane.finish()
        elif isinstance(news, Late):
            yield from lane.finish("time")
        else:
            raise news
    except Trouble as trouble:
        if trouble.fatal:
            raise exchange.server.error(trouble) from None
        yield from lane.fail(f"{exchange.server.name}: {trouble.message}")
    except Exception as error:  # whatever a server sends may cost its row, never the others
        words = f"unexpected {type(error).__name__}: {one_line(str(error))}"
        yield from lane.fail(f"{exchange.server.name}: {words}")


def _settings(generation: Generation, backend: str) -> dict[str, Any]:
    settings = {
        "num_return_sequences": generation.num_return_sequences,
        "length_penalty": generation.length_penalty,
        "backend": backend,
    }
    return settings | ({"structure": generation.structure} if generation.structure else {})


def load_servers(setup: EngineSetup) -> RemoteSession:
    """Probe the servers. Raises BackendError, UsageError or ModelError."""
    runtime = setup.runtime
    assert runtime.backend is not None
    session = RemoteSession(runtime.backend, runtime.model if setup.named else None, runtime.tokenizer, setup.note)
    session.live = setup.live
    return session

"""One server: its model and features; and requests with complete responses, such as those of `genctl score`."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from genctl.engines.protocol import Key, Scored, ScoringOptions, TextToScore, ranked
from genctl.engines.server import body as bodies
from genctl.engines.server.answer import (
    BAD_SHAPE,
    ServerError,
    TimedOut,
    ends_run,
    one_line,
    pieces_of,
    row_error,
    tokens_of,
)
from genctl.engines.server.client import TICK_S, Address, Client
from genctl.errors import BackendError, GenctlError, InputError
from genctl.events import Token

if TYPE_CHECKING:
    from genctl.engines.protocol import Outcome

T = TypeVar("T")
IN_FLIGHT = 8  # requests at once, if batch_size is not set
TOLERANCE = 0.1  # nats, between a token in the prompt and the same one generated: passes differ a little
PROMPT = "Hello"
UNABLE = (500, 501)  # statuses, besides 400, for requests that a server cannot do
REFUSED = (400, 422, *UNABLE)
LISTED = 8  # models named in a message
PROBE_S = 30.0  # for a probe, pauses and retries included


class Server:
    """A server that has responded. Raises BackendError if it cannot be used.

    Features are assumed to exist. Only if the server refuses a request, or if a job depends on a feature, is it probed
    with a request for one token.
    """

    def __init__(self, address: Address, model: str | None, note: Callable[[str], object] = lambda line: None) -> None:
        self.client = Client(address, note)
        self.name = address.name
        self.most_sequences = 1 << 16  # per request
        self._able: dict[tuple[str, bool], bool] = {}  # by feature, and whether it is for chats
        self._lock = threading.Lock()
        try:
            self.model, self.owner = self._find_model(model)
        except BaseException:
            self.client.close()
            raise

    def probe(
        self, path: str, body: Mapping[str, Any] | None = None, *, final: tuple[int | None, ...] = UNABLE
    ) -> dict[str, Any]:
        """The response to a request, repeated while the server is busy or still loading its model.

        `final`: statuses that are not retried, because they may mean that a feature is missing. Raises ServerError.
        """
        deadline = time.monotonic() + PROBE_S
        try:
            return self.client.retry(partial(self.client.fetch, path, body, deadline), deadline=deadline, final=final)
        except TimedOut:
            raise ServerError(f"{self.name}: the probe got no answer within {PROBE_S:g} s", fatal=True) from None

    def can(self, feature: str, *, chat: bool = False) -> bool:
        """Whether the server accepts token `ids`, or returns `logprobs`: probed once. Raises ServerError."""
        with self._lock:
            if (feature, chat) not in self._able:
                self._able[feature, chat] = self._probe_feature(feature, chat)
            return self._able[feature, chat]

    def may(self, feature: str, *, chat: bool = False) -> bool:
        """Whether the server may have a feature: False only after a probe has failed."""
        return self._able.get((feature, chat), True)

    def lacks(self, body: Mapping[str, Any], error: ServerError) -> bool:
        """Whether a refused request uses a feature that the server lacks. Raises ServerError."""
        chat = "messages" in body
        has = (("logprobs", bool(body.get("logprobs"))), ("ids", isinstance(body.get("prompt"), list)))
        return error.status in REFUSED and any(there and not self.can(one, chat=chat) for one, there in has)

    def _probe_feature(self, feature: str, chat: bool) -> bool:
        most = "max_tokens" if "max_tokens" in bodies.fields_of(self.owner, chat=chat) else "max_completion_tokens"
        body: dict[str, Any] = {"model": self.model, most: 1}
        body |= {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
        body |= {"prompt": [1, 2]} if feature == "ids" else bodies.logprob_fields(1, chat=chat)
        try:
            answer = self.probe(bodies.PATHS[chat], body)
        except ServerError as error:
            if error.fatal or error.status not in REFUSED:
                raise
            return False
        if feature == "ids":
            return True
        with suppress(ServerError):  # some servers do not list thinking tokens
            (piece,) = pieces_of(answer, 0)[:1]
            return bool(piece.thought) or not all(math.isnan(token.logprob) for token in piece.tokens)
        return False

    def _find_model(self, wanted: str | None) -> tuple[str, str]:
        """The model's name and its owner, which determines the server's dialect."""
        models: dict[str, str] = {}
        try:
            listed = self.client.wait(partial(self.probe, "/models", final=(None,))).get("data")
            models = {str(entry["id"]): str(entry.get("owned_by", "")) for entry in listed or ()}
        except ServerError as error:
            if wanted is None or error.status != 404:  # 404: the server has no list of models
                raise
        except BAD_SHAPE:
            pass
        if wanted is None and len(models) == 1:
            wanted = next(iter(models))
        if wanted is not None and (wanted in models or not models):
            return wanted, models.get(wanted, "")
        names = ", ".join([*map(one_line, list(models)[:LISTED]), *(["…"] if len(models) > LISTED else [])])
        words = f"the server has {len(models)} models; name one with --model: {names}"
        if wanted is not None:
            words = f"there is no model {wanted}; there are: {names}"
        elif not models:
            words = "the server lists no model; name one with --model"
        raise BackendError(f"{self.name}: {words}")


# -- complete responses ------------------------------------------------------------------------------------------------


def in_order(
    servers: Sequence[Server],
    wanted: Iterable[tuple[Key, Callable[[Server], T]]],
    width: int,
    interrupted: Callable[[], object],
) -> Iterator[tuple[Key, T | GenctlError]]:
    """One outcome per row, in order, with at most `width` in flight. Raises BackendError if no request can succeed."""
    incoming, turn = iter(wanted), itertools.cycle(servers)
    due: deque[tuple[Key, Server, Future[T]]] = deque()
    while not interrupted():
        for key, work in itertools.islice(incoming, width - len(due)):
            server = next(turn)
            due.append((key, server, server.client.start(partial(work, server))))
        if not due:
            return
        key, server, future = due[0]
        wait([future], TICK_S)
        for one in servers:
            one.client.tick()
        if not future.done():
            continue
        due.popleft()
        if (error := future.exception()) is None:
            yield key, future.result()
            continue
        failure = row_error(server.name, error)  # a bad response fails only its own row
        if ends_run(failure):
            raise failure
        yield key, failure


def answers(
    servers: Sequence[Server], requests: Sequence[tuple[str, str, dict[str, Any]]], interrupted: Callable[[], object]
) -> Iterator[tuple[str, dict[str, Any] | GenctlError]]:
    """The responses to requests, each with its id; a request is id, path and fields."""

    def work(path: str, fields: Mapping[str, Any], server: Server) -> dict[str, Any]:
        return server.client.retry(partial(server.client.fetch, path, {"model": server.model, **fields}))

    rows = ((id, partial(work, path, fields)) for id, path, fields in requests)
    return in_order(servers, rows, IN_FLIGHT, interrupted)


# -- scores: a server echoes a prompt, token by token, with log-probabilities ------------------------------------------


def score(
    servers: Sequence[Server],
    texts: Iterable[tuple[Key, TextToScore]],
    options: ScoringOptions,
    interrupted: Callable[[], object],
) -> Iterator[tuple[Key, Outcome]]:
    """One outcome per text, in order, with `batch_size` in flight. Raises BackendError if a server cannot score."""
    for server in servers:
        server.client.wait(partial(_check_echo, server))
    rows = ((key, partial(_score_row, text, options)) for key, text in texts)
    return in_order(servers, rows, options.batch_size, interrupted)


def _check_echo(server: Server) -> None:
    """Raises BackendError if the server returns no log-probabilities of a prompt, or wrong ones.

    A token is `generated`, then sent as the end of a prompt: it must have the same log-probability both times. Some
    servers shift the numbers by one token if a model has no BOS.
    """
    body: dict[str, Any] = {"model": server.model, "max_tokens": 1, "temperature": 0.0, "logprobs": 1}
    prompt, why, path = f"{PROMPT}, {PROMPT}", "gives no log-probabilities of a prompt", bodies.PATHS[False]
    try:
        answer = server.probe(path, {**body, "prompt": prompt})
        generated = tokens_of(answer["choices"][0].get("logprobs"), 0)[0]
        whole = prompt + generated.text
        start, token = _echoed(server.probe(path, {**body, "prompt": whole, "echo": True}), whole, 0)[-1]
        # if the last token begins elsewhere, it is a different one, and there is nothing to compare
        if start != len(prompt) or abs(token.logprob - generated.logprob) < TOLERANCE:
            return
        why = "gives log-probabilities for a prompt that contradict those for generated text"
    except (ServerError, InputError, *BAD_SHAPE) as error:
        if isinstance(error, ServerError) and error.fatal:
            raise
    raise BackendError(f"{server.name}: genctl score needs prompt log-probabilities, but the server {why}")


def _score_row(item: TextToScore, options: ScoringOptions, server: Server) -> list[Scored]:
    seconds = options.row_timeout
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    if item.target is not None:
        raise InputError("a target is for encoder-decoders, and a server continues texts")
    if item.candidates and not item.context:
        raise InputError("candidates need a context: the server has no score for the first token of a text")
    context, top = item.context or "", options.detail.top
    try:
        scored = [_score_text(context, text, top, server, deadline) for text in item.candidates or (item.text,)]
    except TimedOut:
        raise ServerError(f"{server.name}: no score within row_timeout = {seconds:g} s") from None
    return ranked(scored, options.by) if item.candidates else scored


def _score_text(context: str, text: str, top: int, server: Server, deadline: float) -> Scored:
    """The score of a text after its context.

    Without a context, the first token is left out if the server has no score for it, as most have none. Raises
    InputError if nothing is left, if a later score is missing, or if a token crosses the end of the context.
    """
    whole, begin = context + text, len(context)
    body = {"model": server.model, "prompt": whole, "max_tokens": 1, "temperature": 0.0, "echo": True}
    fetch = partial(server.client.fetch, bodies.PATHS[False], {**body, "logprobs": max(top, 1)}, deadline)
    prompt = server.client.retry(lambda: _echoed(fetch(), whole, top), deadline=deadline)
    own = [(start, token) for start, token in prompt if start >= begin]
    if begin and (not own or own[0][0] != begin):
        raise InputError("the server reads the end of the context and the beginning of the text as one token")
    if not begin and math.isnan(own[0][1].logprob):
        del own[0]
    if any(math.isnan(token.logprob) for _, token in own):
        raise InputError("the server has no score for a token in the middle of the text")
    if not own:
        raise InputError(
            "the text is a single token, and the server has no score for the first one; "
            "give what comes before it with --context"
        )
    first, tokens = own[0][0], tuple(token for _, token in own)
    nll = math.fsum(-token.logprob for token in tokens) + 0.0
    size = len(whole[first:].encode("utf-8"))
    return Scored(text, (), nll, len(tokens), size, tokens, whole[begin:first], backend=server.name)


def _echoed(answer: Mapping[str, Any], text: str, top: int) -> list[tuple[int, Token]]:
    """The tokens of the prompt `text` in a response to `echo`, each with the index of its first character.

    BOS and generated tokens are left out. Raises InputError if the tokens do not add up to the text, ServerError if
    there are none.
    """
    try:
        logprobs = answer["choices"][0]["logprobs"]
        tokens = tokens_of(logprobs, top)
        offsets = logprobs.get("text_offset")
    except BAD_SHAPE:
        raise ServerError("the answer does not echo the prompt with its log-probabilities", again=True) from None
    lengths = [len(token.text) for token in tokens]
    before = "".join(token.text for token in tokens).find(text)
    if before in (0, *lengths[:1]):  # only BOS may come before
        offsets = [at - before for at in itertools.accumulate(lengths, initial=0)][:-1]
    # else a character is split over several tokens, and the server's own offsets are used
    is_list = isinstance(offsets, list) and len(offsets) == len(tokens) and all(isinstance(at, int) for at in offsets)
    starts = offsets if is_list else []
    inside = [(start, token) for start, token in zip(starts, tokens, strict=False) if 0 <= start < len(text)]
    if not inside or inside[0][0] != 0:
        raise InputError("the tokens that the server reports do not add up to the text")
    return inside

"""`genctl score` on servers: they echo a text with its log-probabilities, or write it, one token after another.

Answers are read whole: a few requests are in flight, and their outcomes come in order.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar

from genctl.config.shapes import BadShape, Natural, value_of
from genctl.engines.protocol import Key, Scored, ScoringOptions, TextToScore, ranked
from genctl.engines.server.answer import pieces_of, tokens_of
from genctl.engines.server.body import path_of
from genctl.engines.server.client import TICK_S
from genctl.engines.server.failure import ServerError, TimedOut, ends_run, row_error
from genctl.engines.server.server import PROBE_S, PROMPT, Server
from genctl.errors import BackendError, GenctlError, InputError, quote
from genctl.events import Token

if TYPE_CHECKING:
    from genctl.engines.protocol import Outcome

T = TypeVar("T")
IN_FLIGHT = 8  # requests of `answers`
LISTED = 20  # tokens of each distribution, at least
LONGER = (1000, 1 << 18)  # lists in which a token is looked for, where a server gives such: llama-server all tokens
PLAIN = path_of(chat=False)
TOLERANCE = 0.1  # nats, between a token that is read and the same one that is written: passes differ a little
Offsets: TypeAlias = list[tuple[int, Token]]  # tokens of a text, each with the character at which it begins
NOT_THE_TEXT = "the tokens that the server reports do not add up to the text"


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
        except GenctlError as error:
            if ends_run(error):
                raise
            outcome = error
        finally:
            for server in servers:
                server.client.tick()
        due.popleft()
        yield key, outcome


def answers(
    servers: Sequence[Server], requests: Sequence[tuple[str, str, dict[str, Any]]], interrupted: Callable[[], object]
) -> Iterator[tuple[str, dict[str, Any] | GenctlError]]:
    """The answers to requests with log-probabilities: id, path and fields."""
    rows = ((id, partial(answer_of, path=path, fields=fields)) for id, path, fields in requests)
    return in_order(servers, rows, IN_FLIGHT, interrupted)


def _answered(server: Server, send: Callable[[], T], deadline: float) -> T:
    """What `send` returns, once it succeeds. Raises TimedOut, and GenctlError for whatever else goes wrong."""
    try:
        return server.client.retry(send, deadline=deadline)
    except TimedOut:
        raise
    except Exception as error:  # whatever a server sends may cost its row, never the others
        raise row_error(server.name, error) from error


def answer_of(server: Server, path: str, fields: Mapping[str, Any], deadline: float = math.inf) -> dict[str, Any]:
    """A checked answer with one choice. Raises ServerError and TimedOut."""

    def send() -> dict[str, Any]:
        answer = server.client.fetch(path, {"model": server.model, **fields}, deadline=deadline)
        if (count := len(pieces_of(answer, 0))) != 1:
            raise ServerError(f"the answer has {count} sequences, not one")
        return answer

    return _answered(server, send, deadline)


class RemoteScorer:
    """Scores texts on servers, `batch_size` of them at once. Raises BackendError where a server cannot."""

    def __init__(self, servers: Sequence[Server], options: ScoringOptions) -> None:
        self._servers, self._options = servers, options
        self._without_echo = {server for server in servers if server.client.wait(partial(_lacks_echo, server))}

    def score(
        self, wanted: Iterable[tuple[Key, TextToScore]], interrupted: Callable[[], object] = lambda: False
    ) -> Iterator[tuple[Key, Outcome]]:
        """As `Scorer.score`: one outcome for each text, in order. Raises BackendError where none can succeed."""
        rows = ((key, partial(self._scored, text)) for key, text in wanted)
        return in_order(self._servers, rows, self._options.batch_size, interrupted)

    def _scored(self, item: TextToScore, server: Server) -> list[Scored]:
        seconds = self._options.row_timeout
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        if item.target is not None:
            raise InputError("a target is for encoder-decoders, and a server continues texts")
        if item.candidates and not item.context:
            raise InputError("candidates need a context: the server has no score for the first token of a text")
        found: list[Scored] = []
        try:
            for text in item.candidates or (item.text,):
                found.append(self._one(item.context or "", text, server, deadline))
        except TimedOut:
            raise ServerError(f"{server.name}: no score within row_timeout = {seconds:g} s") from None
        except InputError as error:
            if not item.candidates:
                raise
            raise InputError(f"candidate {len(found) + 1}: {error.message}") from error
        return ranked(found, self._options.by) if item.candidates else found

    def _one(self, context: str, text: str, server: Server, deadline: float) -> Scored:
        whole, top = context + text, self._options.detail.top
        if server in self._without_echo:
            prompt = self._written(context, text, server, deadline)
        else:
            body = {"model": server.model, "prompt": whole, "max_tokens": 1, "temperature": 0.0, "echo": True}
            body["logprobs"] = max(top, 1)
            fetch = partial(server.client.fetch, PLAIN, body, deadline=deadline)
            prompt = _answered(server, lambda: _echoed(fetch(), whole, top), deadline)
        first, tokens = scored_after(prompt, len(context))
        nll = math.fsum(-token.logprob for token in tokens) + 0.0
        size = len(whole[first:].encode("utf-8"))
        lead = whole[len(context) : first]
        return Scored(text, (), nll, len(tokens), size, tuple(tokens), lead, backend=server.name)

    def _written(self, context: str, text: str, server: Server, deadline: float) -> Offsets:
        """A text behind its context, token by token. Raises ServerError and InputError."""
        read = _tokenized(server, context + text, deadline)
        whole, length = (context + text).encode(), len(context.encode())
        joined = b"".join(piece for _, piece in read)
        begin = len(joined) - len(whole)  # behind BOS, or a space that the tokenizer puts before
        if not read or not joined.endswith(whole) or begin > len(read[0][1]) + 1:
            raise InputError(NOT_THE_TEXT)
        ids = [id for id, _ in read]
        ends = [end - begin for end in itertools.accumulate(len(piece) for _, piece in read)]
        known = max(sum(end <= length for end in ends), 1)
        scored = [Token(id, math.nan) for id in ids[:known]]
        scored += _written_tokens(server, ids[:known], ids[known:], max(self._options.detail.top, LISTED), deadline)
        tokens: Offsets = []
        for at, end, token in zip([-begin, *ends], ends, scored, strict=False):
            start, after = (len(whole[: max(place, 0)].decode(errors="ignore")) for place in (at, end))
            shown = (context + text)[start:after]
            if math.isnan(token.logprob) and at >= length and tokens:
                raise InputError(
                    f"the server does not give the log-probability of {quote(shown)}, at character {start + 1}"
                )
            if end > 0:
                tokens.append((start, replace(token, text=shown, top=token.top[: self._options.detail.top])))
        return tokens


def _lacks_echo(server: Server) -> bool:
    """Whether texts are scored token by token. Raises BackendError where the server can do neither.

    A token is `generated`, and then read as the end of a prompt: it must have the same log-probability both times. Some
    servers shift the numbers by one token where a model has no BOS.
    """
    body: dict[str, Any] = {"model": server.model, "max_tokens": 1, "temperature": 0.0, "logprobs": 1}
    prompt, why = f"{PROMPT}, {PROMPT}", "gives no log-probabilities of a prompt"
    generated: list[Token] = []
    try:
        answer = server.probe(PLAIN, {**body, "prompt": prompt})
        generated = tokens_of(answer["choices"][0].get("logprobs"), 0)
        whole = prompt + generated[0].text
        start, token = _echoed(server.probe(PLAIN, {**body, "prompt": whole, "echo": True}), whole, 0)[-1]
        # a token that begins elsewhere is another one, so there is nothing to compare
        if start != len(prompt) or abs(token.logprob - generated[0].logprob) < TOLERANCE:
            return False
        why = "gives log-probabilities for a prompt that contradict those for generated text"
    except (ServerError, BadShape, InputError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, ServerError) and error.fatal:
            raise
    if generated and all(token.id >= 0 for token in generated) and server.can("ids"):
        with suppress(ServerError, TimedOut):
            if _tokenized(server, PROMPT, time.monotonic() + PROBE_S):
                return True
    raise BackendError(
        f"{server.name}: genctl score needs prompt log-probabilities, but the server {why}",
        hint="a server without an echo is asked for each token if it takes and lists ids, and has /tokenize",
    )


# -- a text that a server writes itself, token by token (llama-server) -------------------------------------------------


def _written_tokens(
    server: Server, prompt: Sequence[int], ids: Sequence[int], top: int, deadline: float
) -> list[Token]:
    """Tokens behind a prompt with the numbers that a server lists as it writes them.

    It writes greedily. Where it writes another token, the given one is looked for in the list there, then in longer
    ones, and it continues behind it. NaN where no list has it.
    """

    def greedy(count: int, top: int) -> list[Token]:
        fields = {"prompt": [*prompt, *ids[: len(found)]], "max_tokens": count, "temperature": 0.0, "logprobs": top}
        answer = answer_of(server, PLAIN, fields, deadline)
        if not (tokens := tokens_of(answer["choices"][0].get("logprobs"), top)):
            raise ServerError(f"{server.name}: the answer has no log-probabilities of its tokens")
        return tokens

    found: list[Token] = []
    while len(found) < len(ids):
        left = ids[len(found) :]
        tokens = greedy(len(left), top)
        agreed = sum(itertools.takewhile(bool, (token.id == id for token, id in zip(tokens, left, strict=False))))
        found += tokens[:agreed]
        if agreed == len(left):
            break
        id, best = left[agreed], tokens[agreed].top if agreed < len(tokens) else ()
        for longer in LONGER:
            if any(entry[0] == id for entry in best):
                break
            try:
                best = greedy(1, longer)[0].top
            except ServerError as error:  # it gives no such lists
                if error.fatal:
                    raise
        place = next((place for place, entry in enumerate(best) if entry[0] == id), None)
        found.append(Token(id, math.nan) if place is None else Token(id, best[place][2], rank=place + 1, top=best))
    return found


class _Piece(TypedDict):
    id: Natural
    piece: str | list[Natural]  # bytes, where they are no text


class _Tokenized(TypedDict):
    tokens: list[_Piece]


def _tokenized(server: Server, text: str, deadline: float) -> list[tuple[int, bytes]]:
    """The ids and bytes of a prompt, where a server reports how it reads it (llama-server). Raises ServerError."""
    body = {"content": text, "add_special": True, "parse_special": True, "with_pieces": True}
    fetch = partial(server.client.fetch, "/tokenize", body, root=True, deadline=deadline)
    answer = _answered(server, fetch, deadline)
    try:
        pieces = [(one["id"], one["piece"]) for one in value_of(_Tokenized, answer)["tokens"]]
        return [(id, piece.encode() if isinstance(piece, str) else bytes(piece)) for id, piece in pieces]
    except (BadShape, ValueError):
        message = f"{server.name}: the server does not report which tokens it reads (/tokenize)"
        raise ServerError(message) from None


# -- a prompt that a server sends back, token by token, with its log-probabilities -------------------------------------


def _echoed(answer: Mapping[str, Any], text: str, top: int) -> Offsets:
    """The tokens of the prompt `text` in an answer to `echo`, without BOS and what was generated.

    Raises InputError where its tokens are not those of the text, ServerError without any.
    """
    try:
        logprobs = answer["choices"][0]["logprobs"]
        tokens = tokens_of(logprobs, top)
        offsets = logprobs.get("text_offset")
    except (BadShape, LookupError, TypeError, AttributeError):
        raise ServerError("the answer does not echo the prompt with its log-probabilities", again=True) from None
    lengths = [len(token.text) for token in tokens]
    before = "".join(token.text for token in tokens).find(text)
    if before in (0, *lengths[:1]):  # only BOS may come before
        offsets = [at - before for at in itertools.accumulate(lengths, initial=0)][:-1]
    # else a character is spread over several tokens, and the server's own offsets hold
    is_list = isinstance(offsets, list) and len(offsets) == len(tokens)
    if not is_list or not all(isinstance(at, int) for at in offsets):
        raise InputError(NOT_THE_TEXT)
    inside = [(start, token) for start, token in zip(offsets, tokens, strict=True) if 0 <= start < len(text)]
    if not inside or inside[0][0] != 0:
        raise InputError(NOT_THE_TEXT)
    return inside


def scored_after(prompt: Offsets, begin: int) -> tuple[int, list[Token]]:
    """The scored tokens of what begins at a character, and the character at which the first of them begins.

    The first token of a text, which most servers give no score, is left out. Raises InputError where nothing is left,
    and where a token crosses `begin`.
    """
    own = [(start, token) for start, token in prompt if start >= begin]
    if begin and (not own or own[0][0] != begin):
        raise InputError("the server reads the end of the context and the beginning of the text as one token")
    if begin and any(math.isnan(token.logprob) for _, token in own):
        raise InputError("the server has no score for a token after the context")
    scored = own[1:] if own and math.isnan(own[0][1].logprob) else own
    if any(math.isnan(token.logprob) for _, token in scored):
        raise InputError("the server has no score for a token in the middle of the text")
    if not scored:
        raise InputError(
            "the text is a single token, and the server has no score for the first one; "
            "give what comes before it with --context"
        )
    return scored[0][0], [token for _, token in scored]

"""Log-probabilities of given tokens, by a server that echoes no prompt: it writes them itself, one after another."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from typing import Any, TypeAlias, TypeVar

from genctl.engines.server.answer import pieces_of, tokens_of
from genctl.engines.server.client import TICK_S
from genctl.engines.server.failure import Disconnected, RowFailure, ServerError, TimedOut, one_line, retry
from genctl.engines.server.server import REFUSED, Server
from genctl.errors import BackendError, GenctlError, InputError
from genctl.events import UNKNOWN_ID, Token

Key = TypeVar("Key")
T = TypeVar("T")
TOPS = (20, 5)  # tokens of each distribution: the second where a server gives no more, as OpenAI's
BIAS = 100  # of a token that is to be written: the most that OpenAI's interface takes
LONGER = (1000, 1 << 18)  # lists in which a token is looked for, where a server gives such: llama-server all tokens
TOLERANCE = 0.1  # nats, between a token that is read and the same one that is written: passes differ a little
Ids: TypeAlias = Sequence[int]
IsText: TypeAlias = Callable[[int, str], bool]  # whether a text is that of a token


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
        self._unable: set[tuple[Server, str]] = set()
        self._sound: set[Server] = set()  # a bias does not change the numbers that it reports

    def answer(
        self, server: Server, path: str, fields: Mapping[str, Any], deadline: float = math.inf, late: str = ""
    ) -> dict[str, Any]:
        """A checked answer with one choice. Raises RowFailure and BackendError."""
        key = "top_logprobs" if "top_logprobs" in fields else "logprobs"

        def send() -> dict[str, Any]:
            top = self._tops[server]
            try:
                answer = server.client.post(path, {"model": server.model, key: top, **fields}, deadline=deadline)
            except ServerError as error:
                if top <= TOPS[1] or fields.get(key) or error.status not in REFUSED:
                    raise
                self._tops[server] = TOPS[1]
                return send()
            if (count := len(pieces_of(answer, 0, set()))) != 1:
                raise ServerError(f"the answer has {count} sequences, not one")
            return answer

        return answered(server, send, seed=fields["max_tokens"], deadline=deadline, late=late)

    def tokens(self, server: Server, fields: Mapping[str, Any], **late: Any) -> list[Token]:
        """The tokens of a greedy answer. Raises GenctlError."""
        answer = self.answer(server, "/completions", {"temperature": 0.0, **fields}, **late)
        doubts: set[str] = set()
        found = tokens_of(answer["choices"][0].get("logprobs"), int(fields.get("logprobs", self._tops[server])), doubts)
        if not found:
            raise RowFailure(f"{server.name}: the answer has no log-probabilities of its tokens")
        if doubts:
            raise InputError(f"{server.name}: gives a log-probability that is not a number up to 0")
        return found

    def written(self, server: Server, prompt: Ids, ids: Ids, is_text: IsText, **late: Any) -> list[Token]:
        """Tokens behind a prompt with the numbers that a server gives as it writes them itself.

        Where it writes another token than the given one, that one is looked for, and it continues behind it. NaN where
        it gives none. `is_text`: whether a text is that of a token.
        """
        found: list[Token] = []
        while len(found) < len(ids):
            left = ids[len(found) :]
            fields = {"prompt": [*prompt, *ids[: len(found)]], "max_tokens": len(left)}
            tokens = self.tokens(server, fields, **late)
            pairs = zip(left, tokens, strict=False)
            agreed = [token for _, token in itertools.takewhile(lambda pair: is_text(pair[0], pair[1].text), pairs)]
            found += agreed
            if len(agreed) < len(left):
                other = tokens[len(agreed)] if len(agreed) < len(tokens) else None
                behind = [*prompt, *ids[: len(found)]]
                found.append(self._wanted(server, behind, left[len(agreed)], other, is_text, late))
        return found

    def _wanted(
        self, server: Server, prompt: Ids, id: int, other: Token | None, is_text: IsText, late: Mapping[str, Any]
    ) -> Token:
        """A token that a server does not write: in the list of the `other` one, written with a bias, or in longer ones.

        A bias must leave the number of the best token as it is: else the number of the wanted one is not raw, either.
        """
        top = () if other is None else other.top
        best, one = _best(other), other
        asks: list[dict[str, Any]] = [{}, {"logit_bias": {str(id): BIAS}}, *({"logprobs": most} for most in LONGER)]
        for ask in asks:
            if (kind := (server, str(ask)[:18])) in self._unable:
                continue
            if ask:
                try:
                    one = self.tokens(server, {"prompt": prompt, "max_tokens": 1, **ask}, **late)[0]
                except (RowFailure, InputError):
                    if time.monotonic() >= late.get("deadline", math.inf):
                        raise
                    self._unable.add(kind)
                    continue
            if one is None:
                continue
            now = _best(one)
            near = now[1] == best[1] and abs(now[0] - best[0]) < TOLERANCE
            if "logit_bias" in ask and near:
                self._sound.add(server)
            if "logit_bias" in ask and not near and (best[1] or server not in self._sound):
                continue
            is_written = is_text(id, one.text)
            own = [value for _, text, value in one.top if "\ufffd" not in text and is_text(id, text)]
            if is_written or len(own) == 1:
                value, top = one.logprob if is_written else own[0], top or one.top
                break
        else:
            value = math.nan
        alike = [is_text(id, text) for _, text, _ in top]
        marked = tuple((UNKNOWN_ID if own and sum(alike) == 1 else UNKNOWN_ID - 1 - place, text, number)
                       for place, (own, (_, text, number)) in enumerate(zip(alike, top, strict=True)))  # fmt: skip
        return Token(id, value, rank=alike.index(True) + 1 if sum(alike) == 1 else None, top=marked)


def _best(token: Token | None) -> tuple[float, str]:
    """The number and the text of the most probable token; no text where it is not known."""
    top = () if token is None else token.top
    return max(((value, text) for _, text, value in top), default=(math.nan, ""))

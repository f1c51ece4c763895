"""HTTP to one server: JSON answers, and streams of server-sent events.

Requests run on an event loop in a thread of its own, so that one deadline covers all of a request: connecting, headers,
body, and the pauses between attempts.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import aclosing, suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from importlib import import_module
from typing import Any, TypeVar

from genctl.engines.server.address import KEYS, Address, key_of
from genctl.engines.server.failure import Gone, Late, Trouble, asked_s, one_line
from genctl.engines.server.reading import (
    ENCODINGS,
    MOST_BYTES,
    MOST_REFUSAL,
    Body,
    Lines,
    message_of,
    object_of,
    part_of,
)
from genctl.errors import BackendError, extra

T = TypeVar("T")

CONNECT_S = 10.0
SILENCE_S = 600.0  # until an answer or the next part of it is there: a long prompt may take minutes to read
AFTER_S = 10.0  # for what follows the end of the last text, such as the number of its tokens
TICK_S = 0.1  # between two looks at what is to be reported
_BUSY = (408, 409, 425, 429)
_PROXIES = ("all_proxy", "https_proxy", "http_proxy")


class Client:
    """A connection pool to one server, and the thread that serves it."""

    def __init__(self, address: Address, say: Callable[[str], object] = lambda line: None) -> None:
        """`say` reports a line, in the thread that calls `hear`. Raises BackendError."""
        try:
            self._http: Any = import_module("httpx2")
            self._anyio: Any = import_module("anyio")
        except ImportError:
            raise BackendError("--backend needs httpx2, which is not installed", hint=extra("server")) from None
        self.address = address
        key, self._key_hint = key_of(address)
        if not (key.isascii() and key.isprintable()):
            raise BackendError(f"the key in {KEYS[0]} or {KEYS[1]} holds characters that no header may hold")
        self.has_key = bool(key)
        self._say = say
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reported: set[str] = set()
        if key and not address.is_here and not address.base.startswith("https:"):
            self.note("the key goes there over plain HTTP, where others can read it on its way")
        self._quiet_until = 0.0
        self._client = self._opened({"Authorization": f"Bearer {key}"} if key else {})
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)  # each request reports its own failure
        self._thread = threading.Thread(target=self._loop.run_forever, name=address.name, daemon=True)
        self._thread.start()

    def _opened(self, headers: dict[str, str]) -> Any:
        http = self._http
        try:
            return http.AsyncClient(
                headers={"Accept-Encoding": ENCODINGS, **headers},
                timeout=http.Timeout(None, connect=CONNECT_S),
                limits=http.Limits(max_connections=None),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # a server may not store anything here
                trust_env=not self.address.is_here,
            )
        except Exception as error:  # of several kinds, and none of them documented
            proxies = [name for name in os.environ if name.lower() in _PROXIES and os.environ[name]]
            names = " or ".join(sorted(proxies)) or "the environment"
            if isinstance(error, ImportError):
                raise BackendError(
                    f"{self.address.name}: the proxy of {names} is a SOCKS proxy, which needs the package socksio",
                    hint="pip install socksio, or list the server in NO_PROXY",
                ) from None
            raise BackendError(
                f"{self.address.name}: the proxy of {names} cannot be used: {one_line(str(error))}",
                hint="write it as http://host:port, or list the server in NO_PROXY",
            ) from None

    def close(self) -> None:
        """End all requests and close all connections."""
        if not self._thread.is_alive():
            return
        with suppress(NotYet, RuntimeError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(1.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    # -- from other threads --------------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; meanwhile notices are reported."""
        future = self.start(work)
        try:
            while True:
                try:
                    return future.result(TICK_S)
                except NotYet:
                    if future.done():
                        raise
                finally:
                    self.hear()
        finally:
            future.cancel()

    def hear(self) -> None:
        """Report the notices that have come since."""
        with suppress(queue.Empty):
            while True:
                self._say(self._lines.get_nowait())

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def note(self, words: str) -> None:
        """Give notice of something that is wrong with answers, once for each thing."""
        if words not in self._reported:
            self._reported.add(words)
            self._lines.put(f"{self.address.name}: {words}")

    def note_pause(self, reason: str, seconds: float) -> None:
        """Give notice of a pause, once for all that wait at the same time."""
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + seconds
            self._lines.put(f"{self.address.name}: {reason}: trying again in {seconds:.0f} s")

    async def get(self, path: str, *, root: bool = False, deadline: float | None = None) -> dict[str, Any]:
        """The JSON at a path of the interface, or of the server's root. Raises Trouble or Late."""
        return await self._answer("GET", (self.address.root if root else self.address.base) + path, None, deadline)

    async def post(
        self, path: str, body: Mapping[str, Any], *, root: bool = False, deadline: float | None = None
    ) -> dict[str, Any]:
        """The JSON that answers `body`. Raises Trouble or Late."""
        return await self._answer("POST", (self.address.root if root else self.address.base) + path, body, deadline)

    async def _answer(
        self, method: str, url: str, body: Mapping[str, Any] | None, deadline: float | None
    ) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def take(part: dict[str, Any]) -> bool:
            found.append(part)
            return True

        await self._exchange(method, url, body, deadline, MOST_BYTES, take, streams=False)
        return found[0]

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        take: Callable[[dict[str, Any]], bool],
        *,
        deadline: float | None,
        sequences: int,
    ) -> None:
        """Give the parts of the answer to `take` as they come; one part where the server does not stream.

        `take` returns whether all texts have ended; little time is left then for what follows. `deadline` is on the
        monotonic clock. A stream that ends without `[DONE]` ends quietly: whether all is there is for the caller to
        see. Raises Trouble, Late, and what `take` raises.
        """
        most = MOST_BYTES * sequences
        await self._exchange("POST", self.address.base + path, body, deadline, most, take, streams=True)

    async def _exchange(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None,
        deadline: float | None,
        most: int,
        take: Callable[[dict[str, Any]], bool],
        *,
        streams: bool,
    ) -> None:
        """Send a request and read all of its answer: the one place that waits for a server.

        The time limit is `deadline`, or the silence of the server if that is earlier. A byte is not an answer: only a
        part that is complete begins the time of silence anew.
        """
        timer = _Timer(self._anyio, deadline)
        try:
            with timer.scope:
                async with self._client.stream(method, url, json=body) as response:
                    await self._read(response, most, take, timer, streams=streams)
        except self._http.TransportError as error:
            raise self._broken(error) from None
        except (Trouble, Late, Gone):
            raise
        except Exception as error:  # of any kind, and groups of them: an address or a proxy that cannot be
            raise Trouble(f"the request cannot be sent: {_cause(error)}", fatal=True) from None
        if timer.scope.cancelled_caught and not timer.ended:
            if timer.is_over:
                raise Late
            raise Trouble(f"no answer within {SILENCE_S:g} s", again=True)

    async def _read(
        self, response: Any, most: int, take: Callable[[dict[str, Any]], bool], timer: _Timer, *, streams: bool
    ) -> None:
        """Take the parts of an answer. Raises Trouble for one that is not 200."""
        headers = response.headers
        kind = headers.get("content-type", "")
        if response.status_code != 200:
            raise self._refusal(response, await _refused(response))
        pieces = _pieces(response, Body(headers.get("content-encoding", ""), most))
        async with aclosing(pieces):
            if not (streams and "text/event-stream" in kind.lower()):
                content = bytearray()
                async for piece in pieces:
                    content += piece
                name = one_line(kind.partition(";")[0]) or "something else"
                take(object_of(content.decode("utf-8", "replace"), "the answer", f" but {name}"))
                return
            lines = Lines()
            async for piece in pieces:
                for line in lines.feed(piece):
                    if not line.startswith("data:"):
                        continue  # comments, names of events, and the empty lines between them
                    data = line[5:].strip()
                    if data == "[DONE]":
                        return
                    ended = take(part_of(data))
                    timer.restart(ended=ended)
                    if timer.is_over:
                        raise Late

    def _broken(self, error: Exception) -> Trouble:
        """Trouble with the connection."""
        http = self._http
        if isinstance(error, http.UnsupportedProtocol):
            return Trouble("the URL cannot be used", fatal=True)
        if isinstance(error, http.ConnectTimeout):
            reason = f"no connection within {CONNECT_S:g} s"
        elif isinstance(error, http.ConnectError):
            reason = f"no connection: {_cause(error)}"
        elif isinstance(error, http.ProxyError):
            reason = f"no connection through the proxy: {one_line(str(error))}"
        elif isinstance(error, http.RemoteProtocolError) and not re.search("disconnect|closed", str(error)):
            reason = f"the answer is not HTTP: {one_line(str(error))}"
        else:
            reason = "the connection was cut"
        return Trouble(reason, again=True)

    def _refusal(self, response: Any, content: bytes) -> Trouble:
        """Trouble with an answer that is not 200."""
        status = int(response.status_code)
        headers = response.headers
        words = f"{status} {message_of(content, headers.get('content-type', ''))}".rstrip()
        if status in (401, 403):
            key = "the key is refused" if self.has_key else self._key_hint
            return Trouble(f"{words} ({key})", fatal=True, status=status)
        if status == 404:
            return Trouble(words, fatal=True, status=status)
        if 300 <= status < 400:
            return Trouble(f"{words} (another address: {one_line(headers.get('location', ''))})", fatal=True)
        if status in _BUSY or status >= 500:
            return Trouble(words, again=True, wait_s=asked_s(headers.get("retry-after")), status=status)
        return Trouble(words, status=status)


class _Timer:
    """The time limit of one request, which moves as parts of the answer come."""

    def __init__(self, anyio: Any, deadline: float | None) -> None:
        self.scope: Any = anyio.CancelScope()
        self.ended = False  # all texts are there
        self._deadline = deadline
        self._now: Callable[[], float] = anyio.current_time
        if self.is_over:
            raise Late
        self.restart()

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and time.monotonic() >= self._deadline - 0.001

    def restart(self, *, ended: bool = False) -> None:
        """A part of the answer has come; with `ended`, that of the last text."""
        if self.ended:
            return
        self.ended = ended
        left = AFTER_S if ended else SILENCE_S
        if self._deadline is not None:
            left = min(left, self._deadline - time.monotonic())
        self.scope.deadline = self._now() + left


async def _pieces(response: Any, body: Body) -> AsyncGenerator[bytes, None]:
    """The decoded pieces of a body."""
    async with aclosing(response.aiter_raw()) as raw:
        async for received in raw:
            for piece in body.pieces(received):
                yield piece


async def _refused(response: Any) -> bytes:
    """As much of the body of a failure as a message needs."""
    content = bytearray()
    with suppress(Trouble):  # too long, or not encoded as it says: the status says enough
        body = Body(response.headers.get("content-encoding", ""), MOST_REFUSAL)
        async with aclosing(_pieces(response, body)) as pieces:
            async for piece in pieces:
                content += piece
    return bytes(content)


def _cause(error: BaseException) -> str:
    """Why there is no connection: the innermost reason, since the outer ones only say that all attempts failed."""
    for _ in range(8):
        if isinstance(error, ConnectionRefusedError):
            return "refused"
        inner = error.__cause__ or error.__context__ or next(iter(getattr(error, "exceptions", ())), None)
        if inner is None:
            break
        error = inner
    return one_line(str(error)) or "unknown host"

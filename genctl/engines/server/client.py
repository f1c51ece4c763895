"""HTTP to one server, in threads: its address and key, JSON responses, and streams of server-sent events.

Each request has its own thread and connection. The thread that waits for it calls `tick`, which shuts down connections
past their deadline: so one deadline covers connecting, headers and body, however slowly they arrive.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import os
import queue
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from importlib import import_module
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from genctl.engines.server.answer import Disconnected, ServerError, TimedOut, error_in, message_of, object_of, one_line
from genctl.errors import BackendError, UsageError, extra, hide_secrets, size

T = TypeVar("T")

# -- addresses and keys ------------------------------------------------------------------------------------------------

SCHEME = "openai:"
KEYS = ("GENCTL_API_KEY", "OPENAI_API_KEY")  # environment variables with a key
OPENAI_HOST = "api.openai.com"
OPENAI_URL = "OPENAI_BASE_URL"  # environment variable of OpenAI's own clients: another server that gets their key


class Address(NamedTuple):
    """A server's address. `base` is its base URL, such as http://localhost:8080/v1."""

    name: str  # in records and messages
    base: str

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine, so no proxy is needed."""
        host = urlsplit(self.base).hostname or ""
        with suppress(ValueError):
            return ipaddress.ip_address(host).is_loopback
        return host == "localhost"


def read(value: str | Sequence[str]) -> tuple[Address, ...]:
    """Parse the addresses of the knob `backend`. Raises UsageError."""
    return tuple(_parse(text) for text in ([value] if isinstance(value, str) else value))


def _parse(text: str) -> Address:
    url = text.removeprefix(SCHEME).rstrip("/")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_url = urlsplit(""), False
    rules = (
        (text.startswith(SCHEME), "expected openai:URL"),
        (is_url and url.isprintable() and " " not in url, "not a URL of http or https"),
        ("@" not in parts.netloc, f"a URL may not hold a password; the key is read from {KEYS[0]} or {KEYS[1]}"),
        (not (parts.query or parts.fragment), "a URL ends with its path, such as /v1"),
    )
    if mistake := next((words for is_kept, words in rules if not is_kept), ""):
        hint = "write a backend as openai:http://localhost:8080/v1"
        raise UsageError(f"backend {hide_secrets(text)}: {mistake}", hint=hint)
    return Address(f"{SCHEME}{url}", url if re.search(r"/v\d+$", url) else f"{url}/v1")


def key_of(address: Address) -> tuple[str, str]:
    """The key for a server ("" if there is none), and a hint for a server that requires one.

    `GENCTL_API_KEY` is sent to every server: the user names them all (`check_key` in `genctl/commands/job.py`).
    `OPENAI_API_KEY` is meant for OpenAI: it is sent there, over HTTPS, or to the server of `OPENAI_BASE_URL`.
    """
    own, openai = (os.environ.get(name, "").strip() for name in KEYS)
    hint = f"a key is needed: set {KEYS[0]}"
    if own or not openai:
        return own, hint
    scheme, host, _ = origin = _origin(address.base)
    is_openai = scheme == "https" and f".{host}".endswith(f".{OPENAI_HOST}")
    if is_openai or (host and origin == _origin(os.environ.get(OPENAI_URL, "").strip())):
        return openai, hint
    return "", f"{hint}; {KEYS[1]} is for {OPENAI_HOST} or the server of {OPENAI_URL}"


def _origin(url: str) -> tuple[str, str, int]:
    with suppress(ValueError):
        parts = urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return "", "", 0


# -- pauses between attempts -------------------------------------------------------------------------------------------

ATTEMPTS = 6
FIRST_S = 0.5  # before the second attempt
LONGEST_S = 30.0
WAITS_S = 300.0  # the longest wait that is accepted from a server
NOTED_S = 1.0  # longer pauses are reported


def pause_s(attempt: int, wait_s: float | None = None) -> float:
    """Seconds to wait after attempt number `attempt`, from 1; at least the `wait_s` that the server requests.

    The wait doubles with each attempt, and jitter shortens it by up to half, so that requests that failed together are
    not repeated together.
    """
    own: float = min(FIRST_S * 2 ** (attempt - 1), LONGEST_S) * random.uniform(0.5, 1.0)
    return own if wait_s is None else max(own, min(wait_s, WAITS_S))


def retry_after(header: str | None) -> float | None:
    """The seconds of a Retry-After header; None if it is not a number. Hundreds of digits become infinity."""
    return float(header) if header and re.fullmatch(r"[0-9]+(\.[0-9]*)?", header.strip()) else None


# -- requests ----------------------------------------------------------------------------------------------------------

CONNECT_S = 10.0
SILENCE_S = 600.0  # until a response or its next part: the prefill of a long prompt may take minutes
TICK_S = 0.1  # between two calls of `tick`
MOST_BYTES = 64 << 20  # of a decoded body; of a stream for each of its sequences
MOST_REFUSAL = 1 << 20  # bytes read from the body of an error response
_BUSY = (408, 409, 425, 429)


@dataclass(eq=False)
class _Connection:
    """The HTTP client of one request in flight, so that its socket is known. It is reused for later requests."""

    http: Any
    until: float = math.inf  # on the monotonic clock
    is_shut: bool = False
    _stream: Any = None

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Remember the newest stream, plain or within TLS."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._stream = info["return_value"]

    def shut(self) -> None:
        """End all reads and writes. May be called more than once."""
        self.is_shut = True
        if self._stream is not None:
            with suppress(OSError):  # also under TLS, without its close message
                socket.socket.shutdown(self._stream.get_extra_info("socket"), socket.SHUT_RDWR)


class Client:
    """Requests to one server."""

    def __init__(self, address: Address, note: Callable[[str], object] = lambda line: None) -> None:
        """`note` is called with a line for the user, in the thread that calls `tick`. Raises BackendError."""
        try:
            self._library: Any = import_module("httpx2")
        except ImportError:
            raise BackendError("--backend needs httpx2, which is not installed", hint=extra("server")) from None
        self.address = address
        key, self._key_hint = key_of(address)
        if not (key.isascii() and key.isprintable()):
            raise BackendError(f"the key in {KEYS[0]} or {KEYS[1]} holds characters that no header may hold")
        self._headers = {"Accept-Encoding": "gzip, deflate", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._note, self._lines = note, queue.SimpleQueue[str]()
        self._quiet_until = 0.0
        self._closed = threading.Event()
        is_plain = address.base.startswith("http:")
        if key and is_plain and not address.is_local:
            self._lines.put(f"{address.name}: the key goes there over plain HTTP, where others can read it on its way")
        skips_tls = is_plain and address.is_local  # reading the certificates takes 20 ms
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if skips_tls else self._library.create_ssl_context()
        self._idle, self._busy = [self._open()], set[_Connection]()

    def _open(self) -> _Connection:
        try:
            http = self._library.Client(
                headers=self._headers,
                timeout=self._library.Timeout(None, connect=CONNECT_S),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # accept no cookies
                trust_env=not self.address.is_local,
                verify=self._tls,
            )
        except Exception as error:  # several kinds, all undocumented
            names = sorted(name for name in os.environ if name.lower() in ("all_proxy", "https_proxy", "http_proxy"))
            words = f"the proxy of {' or '.join(names)} cannot be used: {one_line(str(error))}"
            hint = "write it as http://host:port, or list the server in NO_PROXY"
            raise BackendError(f"{self.address.name}: {words}", hint=hint) from None
        return _Connection(http)

    # -- for the waiting thread ----------------------------------------------------------------------------------------

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a thread."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # raised again where the result is read
                future.set_exception(error)

        threading.Thread(target=run, name=self.address.name, daemon=True).start()
        return future

    def wait(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result; meanwhile call `tick`."""
        future = self.start(work)
        while not future.done():
            wait([future], TICK_S)
            self.tick()
        return future.result()

    def tick(self) -> None:
        """Report pending notes, and end requests past their deadline."""
        while not self._lines.empty():
            self._note(self._lines.get())
        for connection in list(self._busy):
            if time.monotonic() >= connection.until:
                connection.shut()

    def shut(self) -> None:
        """End all requests."""
        for connection in list(self._busy):
            connection.shut()

    def close(self) -> None:
        """End all requests and close all connections."""
        self._closed.set()
        self.shut()
        while self._idle:
            self._idle.pop().http.close()

    # -- for request threads -------------------------------------------------------------------------------------------

    def retry(
        self,
        send: Callable[[], T],
        *,
        deadline: float = math.inf,
        stop: threading.Event | None = None,
        final: tuple[int | None, ...] = (),
    ) -> T:
        """The result of `send`, which is repeated while it raises a ServerError that may pass (`again`).

        No pause goes beyond `deadline`, on the monotonic clock. A status in `final` is not retried. Raises the last
        error, with the server's name and the number of attempts; Disconnected after `stop`; any other exception of
        `send`.
        """
        for attempt in itertools.count(1):
            try:
                return send()
            except ServerError as error:
                failure = error
            if (stop or self._closed).is_set():
                break
            may_pass = failure.again and failure.status not in final
            seconds, wait_s = pause_s(attempt, failure.wait_s), failure.wait_s or 0.0
            is_late = wait_s > WAITS_S or time.monotonic() + seconds >= deadline
            if not may_pass or is_late or attempt == ATTEMPTS:
                words = f" ({attempt} attempts)" if may_pass and attempt > 1 else ""
                if may_pass and attempt < ATTEMPTS and failure.wait_s is not None:
                    words = f" (it asks to wait {wait_s:,.0f} s)"
                name = f"{self.address.name}: "  # the error of a probe already has it
                message = f"{name}{failure.message.removeprefix(name)}{words}"
                raise ServerError(message, fatal=failure.fatal, status=failure.status, hint=failure.hint)
            if seconds > NOTED_S and time.monotonic() >= self._quiet_until:  # once for all requests that wait
                self._quiet_until = time.monotonic() + seconds
                self._lines.put(f"{self.address.name}: {failure.message}: trying again in {seconds:.0f} s")
            if (stop or self._closed).wait(seconds):
                break
        raise Disconnected

    def fetch(self, path: str, body: Mapping[str, Any] | None = None, deadline: float = math.inf) -> dict[str, Any]:
        """The JSON response to a POST of `body`, or a GET without it, at a path. Raises ServerError or TimedOut."""
        with closing(self.stream(path, body, deadline=deadline)) as parts:
            return next(parts)

    def stream(
        self, path: str, body: Mapping[str, Any] | None, *, sequences: int = 1, deadline: float = math.inf
    ) -> Generator[dict[str, Any], None, None]:
        """The parts of a response as they arrive; one part unless the server streams and `body` has `stream`.

        `deadline` is on the monotonic clock. Single bytes do not restart the time limit, only complete parts do. A
        stream without a final `[DONE]` is no error here: the caller checks whether it is complete. Raises ServerError
        and TimedOut.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._open()
        connection.until = min(time.monotonic() + SILENCE_S, deadline)
        self._busy.add(connection)
        url, method = self.address.base + path, "GET" if body is None else "POST"
        streams = body is not None and "stream" in body
        try:
            if time.monotonic() >= deadline:
                raise TimedOut
            with connection.http.stream(method, url, json=body, extensions={"trace": connection.trace}) as response:
                for part in self._parts(response, MOST_BYTES * sequences, streams=streams):
                    yield part
                    connection.until = min(time.monotonic() + SILENCE_S, deadline)
            if connection.is_shut:
                raise EOFError
        except Exception as error:  # any kind, for example for an invalid address or proxy
            if time.monotonic() >= deadline:
                raise TimedOut from None
            raise self._explain(error, is_shut=connection.is_shut) from None
        finally:
            self._busy.discard(connection)
            if connection.is_shut:
                connection.http.close()
            else:
                self._idle.append(connection)

    def _parts(self, response: Any, most: int, *, streams: bool) -> Iterator[dict[str, Any]]:
        """The parts of a response. Raises ServerError if its status is not 200."""
        kind, encoding = (response.headers.get(name, "").lower() for name in ("content-type", "content-encoding"))
        kind, encoding = kind.partition(";")[0].strip(), encoding.strip()
        if response.status_code != 200:
            content = b""
            with suppress(ServerError, self._library.DecodingError):  # the status is enough
                content = _content(response, MOST_REFUSAL)
            raise self._refusal(response, message_of(content, kind))
        if encoding not in ("", "identity", "gzip", "deflate"):
            raise ServerError(f"the answer is encoded as {one_line(encoding, 40)}, which was not requested", again=True)
        if not (streams and kind == "text/event-stream"):
            instead = f" but {one_line(kind) or 'something else'}"
            yield object_of(_content(response, most).decode("utf-8", "replace"), instead=instead)
            return
        response.encoding = "utf-8-sig"  # whatever charset the header names
        length = 0
        for event in self._library.EventSource(response, max_event_size=most):
            if event.data == "[DONE]":
                return
            if (length := length + len(event.data)) > most:
                raise _too_large(most)
            part = object_of(event.data or "{}", "a part of the stream")
            if part.get("error"):
                raise ServerError(error_in(part) or "the stream holds an error", again=True)
            yield part

    def _refusal(self, response: Any, message: str) -> ServerError:
        """The error for a response with a status other than 200."""
        status, headers, hint = int(response.status_code), response.headers, ""
        words = f"{status} {message}".rstrip()
        if status in (401, 403):
            words += f" ({'the key is refused' if 'Authorization' in self._headers else self._key_hint})"
        elif status == 404 and str(response.url) == f"{self.address.base}/completions":
            words, hint = f"no plain prompts ({words})", "--chat sends each prompt as a chat"
        elif 300 <= status < 400:
            words += f" (another address: {one_line(headers.get('location', ''))})"
        again = status in _BUSY or status >= 500
        wait_s = retry_after(headers.get("retry-after")) if again else None
        is_fatal = status in (401, 403, 404) or 300 <= status < 400
        return ServerError(words, again=again, wait_s=wait_s, fatal=is_fatal, status=status, hint=hint)

    def _explain(self, error: Exception, *, is_shut: bool) -> Exception:
        """The ServerError for a failed request: one that was raised on purpose, or one about the connection."""
        library = self._library
        if is_shut:
            return ServerError(f"no answer within {SILENCE_S:g} s", again=True)
        if isinstance(error, ServerError):
            return error
        if isinstance(error, library.SSEError):
            return _too_large(MOST_BYTES)
        if isinstance(error, library.DecodingError):
            return ServerError("the answer is not encoded as it says", again=True)
        if not isinstance(error, library.TransportError) or isinstance(error, library.UnsupportedProtocol):
            return ServerError(f"the request cannot be sent: {_cause(error)}", fatal=True)
        if isinstance(error, (library.ConnectTimeout, library.ConnectError, library.ProxyError)):
            return ServerError(f"no connection: {_cause(error)}", again=True)
        if isinstance(error, library.RemoteProtocolError) and not re.search("disconnect|closed", str(error)):
            return ServerError(f"the answer is not HTTP: {one_line(str(error))}", again=True)
        return ServerError("the connection was cut", again=True)


def _content(response: Any, most: int) -> bytes:
    """The whole decoded body. Raises ServerError if it is larger than `most` bytes."""
    content = bytearray()
    for piece in response.iter_bytes():
        content += piece
        if len(content) > most:
            raise _too_large(most)
    return bytes(content)


def _too_large(most: int) -> ServerError:
    return ServerError(f"the answer is larger than {size(most, 0)}")


def _cause(error: BaseException) -> str:
    """The innermost cause; the outer ones only report that all attempts failed."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return "refused" if isinstance(error, ConnectionRefusedError) else one_line(str(error)) or "unknown host"

"""HTTP to one server: JSON answers, and streams of server-sent events."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from genctl.backend.address import KEYS, Address
from genctl.backend.failure import BackendError, Gone, Late, Trouble
from genctl.backend.retry import asked_s
from genctl.batch.printable import printable
from genctl.errors import without_secrets

CONNECT_S = 10.0
SILENCE_S = 600.0  # between two parts of an answer: a long prompt may take minutes to read
_BUSY = (408, 409, 425, 429)
_LONGEST = 200  # characters of a server's own message


class Client:
    """A connection pool to one server. Its methods may be called from several threads."""

    def __init__(self, address: Address) -> None:
        try:
            self._http: Any = import_module("httpx2")
        except ImportError:
            raise BackendError(
                "--backend needs httpx2, which is not installed", hint="pip install 'genctl[server]'"
            ) from None
        self.address = address
        key = next((value for name in KEYS if (value := os.environ.get(name, "").strip())), "")
        if not (key.isascii() and key.isprintable()):
            raise BackendError(f"the key in {KEYS[0]} or {KEYS[1]} holds characters that no header may hold")
        self.has_key = bool(key)
        self._client = self._http.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=self._http.Timeout(SILENCE_S, connect=CONNECT_S),
            limits=self._http.Limits(max_connections=None),
            trust_env=not address.is_here,
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def get(self, path: str, *, root: bool = False) -> Any:
        """The JSON at a path of the interface, or of the server's root. Raises Trouble."""
        return self._answer("GET", (self.address.root if root else self.address.base) + path)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers `body`. Raises Trouble."""
        return self._answer("POST", self.address.base + path, body)

    def stream(
        self, path: str, body: Mapping[str, Any], *, deadline: float | None, gone: Callable[[], bool]
    ) -> Iterator[dict[str, Any]]:
        """The parts of the answer to `body`, as they come; one part where the server does not stream.

        `deadline` is on the monotonic clock. Raises Trouble, Late, or Gone once `gone` returns true. A stream that ends
        without `[DONE]` ends quietly: whether all is there is for the caller to see.
        """
        left = SILENCE_S if deadline is None else min(SILENCE_S, deadline - time.monotonic())
        if left <= 0:
            raise Late
        timeout = self._http.Timeout(left, connect=min(left, CONNECT_S))
        try:
            with self._client.stream("POST", self.address.base + path, json=body, timeout=timeout) as response:
                if response.status_code != 200:
                    response.read()
                    raise self._refusal(response)
                if "text/event-stream" not in response.headers.get("content-type", ""):
                    response.read()
                    yield _object(response)
                    return
                for line in _lines(response):
                    if gone():
                        raise Gone
                    if deadline is not None and time.monotonic() >= deadline:
                        raise Late
                    if not line.startswith("data:"):
                        continue  # comments, names of events, and the empty lines between them
                    data = line[5:].strip()
                    if data == "[DONE]":
                        return
                    yield _part(data)
        except self._http.TransportError as error:
            if deadline is not None and time.monotonic() >= deadline - 0.01:
                raise Late from None
            raise self._broken(error) from None

    def _answer(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            response = self._client.request(method, url, json=body)
        except self._http.TransportError as error:
            raise self._broken(error) from None
        if response.status_code != 200:
            raise self._refusal(response)
        return _object(response)

    def _broken(self, error: Exception) -> Trouble:
        """Trouble with the connection."""
        http = self._http
        if isinstance(error, http.UnsupportedProtocol):
            return Trouble("the URL cannot be used", fatal=True)
        if isinstance(error, http.ConnectTimeout):
            reason = f"no connection within {CONNECT_S:g} s"
        elif isinstance(error, http.TimeoutException):
            reason = f"no answer within {SILENCE_S:g} s"
        elif isinstance(error, http.ConnectError):
            reason = "no connection: " + (
                "refused" if "refused" in str(error) else _short(str(error)) or "unknown host"
            )
        else:
            reason = "the connection was cut"
        return Trouble(reason, again=True)

    def _refusal(self, response: Any) -> Trouble:
        """Trouble with an answer that is not 200."""
        status = int(response.status_code)
        said = _message(response)
        words = f"{status} {said}".rstrip()
        if status in (401, 403):
            key = "the key is refused" if self.has_key else f"a key is needed: set {KEYS[0]}"
            return Trouble(f"{words} ({key})", fatal=True, status=status)
        if status == 404:
            return Trouble(words, fatal=True, status=status)
        if 300 <= status < 400:
            return Trouble(f"{words} (another address: {_short(response.headers.get('location', ''))})", fatal=True)
        if status in _BUSY or status >= 500:
            return Trouble(words, again=True, wait_s=asked_s(response.headers.get("retry-after")), status=status)
        return Trouble(words, status=status)


def _lines(response: Any) -> Iterator[str]:
    """The lines of a stream as they come. Only LF ends one: JSON may hold other line separators of Unicode as they are.

    A last line that is cut short is left out.
    """
    rest = b""
    for piece in response.iter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")


def _object(response: Any) -> dict[str, Any]:
    """The JSON object of a whole answer. Raises Trouble."""
    try:
        data = json.loads(response.content)
    except (ValueError, RecursionError):
        kind = response.headers.get("content-type", "").partition(";")[0] or "something else"
        raise Trouble(f"the answer is not JSON but {_short(kind)}", again=True) from None
    if not isinstance(data, dict):
        raise Trouble("the answer is JSON, but no object", again=True)
    return data


def _part(data: str) -> dict[str, Any]:
    """The object of one event of a stream. Raises Trouble."""
    try:
        part = json.loads(data)
    except (ValueError, RecursionError):
        raise Trouble("a part of the stream is not JSON", again=True) from None
    if not isinstance(part, dict):
        raise Trouble("a part of the stream is JSON, but no object", again=True)
    if "error" in part:
        raise Trouble(_said(part) or "the stream holds an error", again=True)
    return part


def _message(response: Any) -> str:
    """What a server says of a failure, on one short line."""
    try:
        data = json.loads(response.content)
    except (ValueError, RecursionError):
        html = "html" in response.headers.get("content-type", "")
        return "" if html else _short(response.text)
    return _said(data)


def _said(data: Any) -> str:
    """The message of a JSON error, in any of the usual forms."""
    if isinstance(data, dict):
        error = data.get("error", data.get("detail", data.get("message", "")))
        if isinstance(error, dict):
            error = error.get("message", "")
        if isinstance(error, list) and error and isinstance(error[0], dict):  # of FastAPI's checks
            place = ".".join(str(part) for part in error[0].get("loc", ()))
            error = f"{place}: {error[0].get('msg', '')}"
        if isinstance(error, str):
            return _short(error)
    return ""


def _short(text: str) -> str:
    """The first line of a text from a server, harmless for a terminal."""
    line = next(iter(text.strip().splitlines()), "")
    line = printable(without_secrets(line))
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"

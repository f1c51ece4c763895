"""A test server with OpenAI's API: it answers by rule, and fails in every way that a test wants."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
# a request -> its failure (status, headers and content); None if it is answered
Fault = Callable[["StandIn", Body], "Failure | None"]


@dataclass(frozen=True)
class Failure:
    """One failed answer."""

    status: int = 200
    content: bytes = b""
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # tokens of a correct stream, after which the connection is closed
    slow_s: float = 0.0  # between two tokens
    raw: Callable[[Callable[[bytes], object]], object] | None = None  # writes all bytes, including the status line


@dataclass
class StandIn:
    """The server's properties, and the requests that it received."""

    models: tuple[str, ...] = ("tiny",)
    owner: str = "vllm"
    ids: bool = True
    logprobs: bool = True
    several: bool = True
    echoes: bool = True
    shift: float = 0.0  # subtracted from the log-probabilities of its own words in prompts
    key: str = ""
    words: tuple[str, ...] = (" one", " two", " three", " four", " five", " six")
    ends: bool = True  # whether a text ends by itself, after the words
    thought: tuple[str, ...] = ()  # in chats, before the words
    thought_field: str = "reasoning_content"
    lists_thought: bool = False  # whether the tokens of a thought are among those with log-probabilities
    slots: int | None = None  # maximum sequences of one request, as for llama-server
    listed_ids: bool = False  # whether tokens are listed with ids, as by llama-server
    fault: Fault = lambda server, body: None
    answers: Callable[[Body], Body] | None = None  # a model, in place of the rules
    wrong_models: Failure | None = None
    asked: list[Body] = field(default_factory=list)  # all requests, with path and key
    on_headers: Callable[[Any], object] = lambda headers: None
    inside: int = 0  # requests in flight now
    most: int = 0  # the most at any time
    url: str = ""
    lock: Any = field(default_factory=threading.Lock)

    @property
    def rows(self) -> list[Body]:
        """The requests that are not probes: those with `stream`."""
        return [body for body in self.asked if body.get("stream")]

    def text(self, body: Body, choice: int) -> list[str]:
        """The words of the answer; if the text is sampled, they depend on the seed."""
        words = [*self.words]
        if body.get("temperature"):
            turn = (body.get("seed", 0) + choice) % len(words)
            words = words[turn:] + words[:turn]
        return words


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the body waits 40 ms for the acknowledgement of the headers
    stand_in: StandIn

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.stand_in
        if self.path == "/v1/models":
            if server.wrong_models is not None:
                self._fail(server.wrong_models)
            elif not self._refused():
                self._json({"data": [{"id": name, "owned_by": server.owner} for name in server.models]})
        else:
            self._json({"error": {"message": "no such page"}}, 404)

    def do_POST(self) -> None:
        server = self.stand_in
        server.on_headers(self.headers)
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if len(content) < int(self.headers["Content-Length"]):
            return  # the client has disconnected
        body = json.loads(content)
        with server.lock:
            server.asked.append({**body, "path": self.path, "key": self.headers.get("Authorization", "")})
            server.inside += 1
            server.most = max(server.most, server.inside)
        try:
            if self._refused():
                return
            failure = server.fault(server, body)
            if failure is not None and failure.cut_after is None and not failure.slow_s:
                self._fail(failure)
            elif isinstance(body.get("prompt"), list) and not server.ids:
                self._json({"error": {"message": "prompt must be a string"}}, 400)
            elif server.slots is not None and body.get("n", 1) > server.slots:
                words = f"Field 'n': Value must be between 1 <= value <= {server.slots}, but got {body['n']}"
                self._json({"error": {"code": 400, "message": words}}, 400)
            elif body.get("logprobs") and not server.logprobs:
                self._json({"error": {"message": "no logprobs here"}}, 400)
            elif server.answers is not None and not body.get("stream"):
                self._json(server.answers(body))
            else:
                self._answer(body, failure or Failure())
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with server.lock:
                server.inside -= 1

    def _refused(self) -> bool:
        key = self.stand_in.key
        if not key or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._json({"error": {"message": "who are you?"}}, 401)
        return True

    def _answer(self, body: Body, failure: Failure) -> None:
        server, chat = self.stand_in, "messages" in body
        count = body.get("n", 1) if server.several else 1
        budget = body.get("max_tokens", 16)
        thought = list(server.thought)[:budget] if chat else []
        left = budget - len(thought)
        written = [server.text(body, choice) for choice in range(count)]
        endings = ["length" if left < len(one) or not server.ends else "stop" for one in written]
        written = [one[:left] for one in written]
        usage = {"prompt_tokens": 3, "completion_tokens": sum(map(len, written)) + len(thought) * count}
        asked = body.get("logprobs")
        top = (body.get("top_logprobs", 0) if chat else asked) if asked is not None and asked is not False else None
        if not body.get("stream"):
            parts = [self._choice(place, one, top, chat, end, whole=True) for place, (one, end) in
                     enumerate(zip(written, endings, strict=True))]  # fmt: skip
            for part in parts if thought else ():
                part["message"][server.thought_field] = "".join(thought)
            if body.get("echo"):
                if not server.echoes:
                    self._json({"error": {"message": "echo is not supported"}}, 400)
                    return
                parts[0] = _echoed(body["prompt"], written[0], asked, server.shift)
            self._json({"choices": parts, "usage": usage})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        sent = 0
        for choice in range(count):
            for word in thought:
                part = self._choice(choice, [word], top if server.lists_thought else None, chat)
                part["delta"] = {server.thought_field: word}
                self._event({"choices": [part]})
        for place in range(max(map(len, written))):
            for choice, one in enumerate(written):
                if place < len(one):
                    if failure.cut_after == sent:
                        return
                    time.sleep(failure.slow_s)
                    self._event({"choices": [self._choice(choice, one[place : place + 1], top, chat)]})
                    sent += 1
        for choice, end in enumerate(endings):
            self._event({"choices": [self._choice(choice, [], top, chat, end)]})
        if (body.get("stream_options") or {}).get("include_usage"):
            self._event({"choices": [], "usage": usage})
        self._raw(b"data: [DONE]\n\n")

    def _choice(
        self, index: int, words: list[str], top: int | None, chat: bool, end: str | None = None, *, whole: bool = False
    ) -> Body:
        text = "".join(words)
        choice: Body = {"index": index, "finish_reason": end}
        choice |= {"message" if whole else "delta": {"content": text}} if chat else {"text": text}
        if top is not None and words and self.stand_in.listed_ids:
            choice["logprobs"] = {"content": [
                {"id": 100 + len(word), "token": word, "logprob": -0.5, "top_logprobs": [
                    {"id": 100 + len(word), "token": word, "logprob": -0.5}, {"id": 7, "token": "?", "logprob": -2.0}]}
                for word in words
            ]}  # fmt: skip
        elif top is not None and words and chat:
            choice["logprobs"] = {"content": [
                {"token": word, "logprob": -0.5, "top_logprobs": [{"token": word, "logprob": -0.5}][:top]}
                for word in words
            ]}  # fmt: skip
        elif top is not None and words:
            others = {f"{place}?": -1.0 - place for place in range(max(top - 1, 0))}
            choice["logprobs"] = {
                "tokens": words,
                "token_logprobs": [-0.5] * len(words),
                "top_logprobs": [{word: -0.5, **others} for word in words] if top else None,
            }
        return choice

    def _event(self, part: Body) -> None:
        self._raw(f"data: {json.dumps(part, ensure_ascii=False)}\n\n".encode())

    def _raw(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _json(self, data: Any, status: int = 200) -> None:
        self._fail(Failure(status, json.dumps(data).encode()))

    def _fail(self, failure: Failure) -> None:
        if failure.raw is not None:
            self.close_connection = True
            failure.raw(self._raw)
            return
        self.send_response(failure.status)
        self.send_header("Content-Type", failure.kind)
        self.send_header("Content-Length", str(len(failure.content)))
        for name, value in failure.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(failure.content)


def _echoed(prompt: str, words: list[str], asked: int | None, shift: float) -> Body:
    """The prompt word by word, then the answer. The k-th token (from 0) has the log-probability -k, the first has none.

    Words of the server's own texts have the log-probability with which it writes them, minus `shift`.
    """
    tokens = [piece if place == 0 else f" {piece}" for place, piece in enumerate(prompt.split(" "))] + words
    offsets = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
    told = None if asked is None else {
        "tokens": tokens,
        "token_logprobs": [
            None,
            *(-0.5 - shift if token in words else -float(place) for place, token in enumerate(tokens[1:], 1)),
        ],
        "top_logprobs": [None, *({token: -1.0} for token in tokens[1:])] if asked else None,
        "text_offset": offsets,
    }  # fmt: skip
    return {"index": 0, "text": "".join(tokens), "finish_reason": "length", "logprobs": told}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # the client has disconnected
            super().handle_error(request, client_address)


@contextmanager
def running(**about: Any) -> Iterator[StandIn]:
    """A server on a free port of this machine."""
    stand_in = StandIn(**about)
    handler = type("Handler", (_Handler,), {"stand_in": stand_in})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    stand_in.url = f"openai:http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def for_rows(failure: Failure, prompt: str = "bad") -> Fault:
    """Fail requests with this prompt, and answer all others."""
    return lambda server, body: failure if body.get("prompt") == prompt else None


def first_times(number: int, failure: Failure) -> Fault:
    """Fail the first `number` streams, then answer."""
    left = [number]

    def fault(server: StandIn, body: Body) -> Failure | None:
        if not body.get("stream") or left[0] == 0:
            return None
        left[0] -= 1
        return failure

    return fault

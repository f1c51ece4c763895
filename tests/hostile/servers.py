"""Answers of hostile servers, whole with their status line, and what must hold for the commands that read them.

A row is answered with an error or with a record whose numbers can be true; the row beside it is not touched; the run
ends within its time, with one line for each fault and nothing that drives a terminal.
"""

from __future__ import annotations

import copy
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from genctl.engines.server import client
from tests.cli.tool import Done, genctl
from tests.engines.server.stand_in import Failure, StandIn, running
from tests.hostile.corpus import spoilt
from tests.hostile.targets import ACCEPTED, REFUSED, Breach

TEXT = " one two three four five six"
ROW_S = "3"

_LOGPROBS = {"tokens": [" a", " b"], "token_logprobs": [-0.5, -1.0], "top_logprobs": [{" a": -0.5}, {" b": -1.0}]}
_WHOLE: dict[str, Any] = {
    "id": "cmpl-1",
    "model": "tiny",
    "choices": [{"index": 0, "text": " a b", "finish_reason": "stop", "logprobs": _LOGPROBS, "token_ids": [3, 4]}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}
_ECHO: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "text": "I drink tea",
            "finish_reason": "length",
            "logprobs": {
                "tokens": ["I", " drink", " tea"],
                "token_logprobs": [None, -1.0, -2.0],
                "top_logprobs": [None, {" drink": -1.0}, {" tea": -2.0}],
                "text_offset": [0, 1, 7],
            },
        }
    ]
}
WILD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 1.5, -0.5, 2**31, 2**63, 10**400, -(10**400), 1e308, -1.7e308, 5e-324),
    *(float("inf"), float("-inf"), float("nan"), "", "x", "-0.5", "\x1b[2J\x07", "\ud800", "\udc00\ud800", "x" * 5000),
    *("\u202eabc", "a\r\nb", "\u2028", [], [[]], [None], {}, {"a": None}, [1, "a", {}], {"": {"": []}}),
)  # fmt: skip
_STATUSES = (
    *(100, 102, 199, 201, 202, 204, 205, 206, 301, 304, 307),
    *(400, 402, 409, 418, 422, 429, 500, 503, 599, 600, 999),
)  # fmt: skip
_RETRY_AFTER = ("0", "0.01", "300", "inf", "1e400", "-1", "nan", "9" * 500, "Fri, 31 Dec 9999 23:59:59 GMT", "\x80", "")
_TYPES = (
    *("application/json", "text/event-stream", "TEXT/EVENT-STREAM; charset=utf-16", "text/plain; charset=zip"),
    *("application/json; charset=idna", "text/html", "", ";;;", "text/event-stream\t", "\x80/\xff"),
)


def answer(random: Random) -> bytes:
    """The bytes of one hostile answer."""
    events = random.random() < 0.5
    body = _events(random) if events else _document(random)
    if random.random() < 0.15:
        body = spoilt(random, body)
    kind = random.choice(_TYPES) if random.random() < 0.2 else ("text/event-stream" if events else "application/json")
    headers = [f"Content-Type: {kind}".encode("latin-1")]
    status = random.choice(_STATUSES) if random.random() < 0.25 else 200
    if random.random() < 0.3:
        body = _encoded(random, body, headers)
    if status in (429, 503) or random.random() < 0.05:
        headers.append(f"Retry-After: {random.choice(_RETRY_AFTER)}".encode("latin-1"))
    body = _framed(random, body, headers)
    if random.random() < 0.15:
        headers.insert(random.randrange(len(headers) + 1), random.choice(_HEADERS)(random))
    version = (
        random.choice((b"HTTP/1.0", b"HTTP/1.1 ", b"HTTP/2.0", b"http/1.1")) if random.random() < 0.1 else b"HTTP/1.1"
    )
    line = b"%s %d %s" % (version, status, random.choice((b"OK",) * 20 + (b"", b"\xff\x00", b"x" * 200)))
    whole = b"\r\n".join([line, *headers, b"", b""]) + body
    if random.random() < 0.05:
        whole = b"HTTP/1.1 100 Continue\r\n\r\n" * random.randrange(1, 2000) + whole
    return spoilt(random, whole) if random.random() < 0.1 else whole


def _wild(random: Random, value: Any) -> Any:
    """A copy of a JSON value with one place of it changed, added, doubled or taken away."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    for _ in range(random.choice((0, 1, 1, 1, 2, 5))):
        holder, key = random.choice(places)
        change = random.random()
        try:
            if change < 0.7:
                holder[key] = random.choice(WILD)
            elif change < 0.8 and isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            elif change < 0.9:
                del holder[key]
            else:
                holder[key] = [copy.deepcopy(holder[key])] * random.choice((1, 3, 300))
        except (LookupError, TypeError):
            continue
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, item in items:
        yield value, key
        if isinstance(item, (dict, list)):
            yield from _places(item)


def _document(random: Random) -> bytes:
    whole = _WHOLE if random.random() < 0.7 else _ECHO
    texts = (
        lambda: json.dumps(_wild(random, whole)),
        lambda: json.dumps(_wild(random, whole), ensure_ascii=False),
        lambda: json.dumps({"detail": [_wild(random, {"loc": ["body", 1], "msg": "no", "type": "x"})]}),
        lambda: json.dumps({"error": _wild(random, {"message": "no", "code": 1})}),
        lambda: '{"choices":' * random.choice((10, 100_000)),
        lambda: json.dumps(random.choice(WILD)),
        lambda: json.dumps(whole) + random.choice(("x", "\0", "{}", "\n" * 999, ",")),
        lambda: " " * random.choice((0, 1, 3 << 20)),
    )
    make = random.choice(texts) if random.random() < 0.5 else texts[0]
    return make().encode(random.choice(("utf-8",) * 8 + ("utf-16", "utf-32", "utf-8-sig")), "surrogatepass")


def _events(random: Random) -> bytes:
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "text": " a", "finish_reason": None}]},
        {"choices": [{"index": 0, "text": " b", "finish_reason": None, "logprobs": _LOGPROBS}]},
        {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]},
        {"choices": [], "usage": _WHOLE["usage"]},
    ]
    parts = [_wild(random, part) if random.random() < 0.3 else part for part in parts]
    if random.random() < 0.2:
        random.shuffle(parts)
    if random.random() < 0.1:
        parts *= random.choice((2, 500))
    end = random.choice((b"\n\n",) * 6 + (b"\r\n\r\n", b"\n", b"\r\r", b""))
    lines = [random.choice((b"data: ",) * 8 + (b"data:", b"DATA: ")) + json.dumps(part).encode() for part in parts]
    if random.random() < 0.8:
        lines.append(b"data: [DONE]")
    if random.random() < 0.4:
        odd = (
            *(b": wait", b"event: error", b"id: \0", b"retry: -1"),
            *(b"data", b"data: ", b"data: {", b"\xef\xbb\xbf", b"x" * (1 << 20)),
        )
        lines.insert(random.randrange(len(lines) + 1), random.choice(odd))
    return end.join([*lines, b""])


def _encoded(random: Random, body: bytes, headers: list[bytes]) -> bytes:
    name, packed = random.choice(
        (
            (b"gzip", gzip.compress(body)),
            (b"deflate", zlib.compress(body)),
            (b"gzip", body),
            (b"gzip", gzip.compress(body)[: random.randrange(20, 60)]),
            (b"gzip", gzip.compress(bytes(4 << 20))),
            (b"gzip", gzip.compress(body) + b"trailing"),
            (b"gzip, gzip", gzip.compress(gzip.compress(body))),
            (b"br", body),
            (b"identity", body),
            (b"\xff", body),
        )
    )
    headers.append(b"Content-Encoding: " + name)
    return packed


def _framed(random: Random, body: bytes, headers: list[bytes]) -> bytes:
    """The body with the header that says where it ends, which may be a lie."""
    frame = random.random()
    if frame < 0.55:
        headers.append(b"Content-Length: %d" % len(body))
    elif frame < 0.7:
        wrong = random.choice(
            (b"0", b"-1", b"+5", b"1e9", b"9" * 30, b"%d" % (len(body) // 2), b"%d" % (len(body) + 9))
        )
        headers.append(b"Content-Length: " + wrong)
    elif frame < 0.85:
        headers.append(b"Transfer-Encoding: chunked")
        cut = random.randrange(len(body) + 1)
        sizes = [b"%x" % cut, b"%x" % (len(body) - cut)]
        if random.random() < 0.4:
            sizes[random.randrange(2)] = random.choice((b"-1", b"f" * 40, b"0", b"zz", b"5;" + b"x" * 70_000))
        last = random.choice((b"0\r\n\r\n",) * 3 + (b"", b"0\r\nX: y\r\n\r\n", b"0\r\n" + b"X: y\r\n" * 9000))
        body = b"".join((sizes[0], b"\r\n", body[:cut], b"\r\n", sizes[1], b"\r\n", body[cut:], b"\r\n", last))
    return body


_HEADERS: tuple[Callable[[Random], bytes], ...] = (
    lambda random: b"Set-Cookie: a=" + b"x" * 4000,
    lambda random: b"no colon",
    lambda random: b"X-\x00: y",
    lambda random: b"X: " + b"y" * random.choice((10, 200_000)),
    lambda random: b"\r\n".join(b"X-%d: y" % number for number in range(random.choice((5, 5000)))),
    lambda random: b"Location: http://127.0.0.1:9/\x1b[31m",
    lambda random: b"Content-Length: 3\r\nContent-Length: 4",
    lambda random: b"Transfer-Encoding: gzip",
    lambda random: b" folded",
)


@contextmanager
def hostile() -> Iterator[Callable[[bytes], str]]:
    """A server that answers the row `bad` with given bytes; what is yielded takes them and returns what came of it."""
    waits = client.FIRST_S, client.WAITS_S, client.AFTER_S
    client.FIRST_S, client.WAITS_S, client.AFTER_S = 0.001, 0.5, 0.3
    bytes_now = [b""]

    def fault(server: StandIn, body: dict[str, Any]) -> Failure | None:
        is_bad = body.get("prompt") == "bad" and (body.get("stream") or body.get("echo"))
        return Failure(raw=lambda send: send(bytes_now[0])) if is_bad else None

    def target(data: bytes) -> str:
        bytes_now[0] = data
        shared = ("--backend", server.url, "--format", "jsonl")
        run = genctl("run", *shared, "--row-timeout", ROW_S, "--top-logprobs", "2", "bad", "Hi")
        became = _checked(run, "text", TEXT)
        _checked(genctl("score", *shared, "--row-timeout", ROW_S, "bad", "I drink tea"), "nll", 3.0)
        return became

    try:
        with running(fault=fault) as server:
            yield target
    finally:
        client.FIRST_S, client.WAITS_S, client.AFTER_S = waits


def _checked(done: Done, key: str, beside: object) -> str:
    """What became of the row. Raises Breach."""
    _check_messages(done)
    if done.status == 3:  # what ends a run: a redirect, a page that is not there
        return REFUSED
    if done.status not in (0, 1):
        raise Breach(f"exit status {done.status}: {done.err}")
    records = [json.loads(line, parse_constant=_no_number) for line in done.out.splitlines()]
    if len(records) != 2 or records[1].get(key) != beside:
        raise Breach(f"the row beside it was touched: {done.out[:500]}")
    return _check_record(records[0])


def _check_record(record: dict[str, Any]) -> str:
    if "error" in record:
        if not record["error"]["message"] or "unexpected" in record["error"]["message"]:
            raise Breach(f"an error that nobody foresaw: {record['error']}")
        return REFUSED
    tokens = record.get("tokens")  # of score, their number
    numbers = [record.get("logprob"), *(one["logprob"] for one in (tokens if isinstance(tokens, list) else ()))]
    if any(one is not None and not (math.isfinite(one) and one <= 0) for one in numbers):
        raise Breach(f"a number that cannot be true: {record}")
    for count in (record.get("usage") or {}).values():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise Breach(f"a count that cannot be true: {record}")
    return ACCEPTED


def _check_messages(done: Done) -> None:
    if "bug" in done.err or "Traceback" in done.err:
        raise Breach(done.err)
    if any(not letter.isprintable() for letter in done.err.replace("\n", "")) or len(done.err) > 3000:
        raise Breach(f"a message that no terminal should get: {done.err[:500]!r}")


def _no_number(name: str) -> None:
    raise Breach(f"a record holds {name}")

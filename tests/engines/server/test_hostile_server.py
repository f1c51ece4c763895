"""A hostile server: it drips, sends bombs, lies about its answers, or sends impossible numbers."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from genctl.engines.server import client
from genctl.engines.server.client import Client, key_of, read
from tests.cli.tool import Done, genctl
from tests.engines.server.stand_in import Body as Request
from tests.engines.server.stand_in import Failure, StandIn, for_rows, running

TEXT = " one two three four five six"
Write = Callable[[bytes], object]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_S", 0.001)


def dripping(before: bytes, drop: bytes) -> Failure:
    def write(send: Write) -> None:
        send(before)
        for _ in range(400):
            send(drop)
            time.sleep(0.05)

    return Failure(raw=write)


def run(server: StandIn, *arguments: str) -> Done:
    return genctl("run", "--backend", server.url, "--format", "jsonl", *arguments)


def answer(**choice: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": " a b", "finish_reason": "stop", **choice}]}).encode()


def scored(*logprobs: object) -> dict[str, object]:
    texts = [f" {letter}" for letter in "abcdef"[: len(logprobs)]]
    return {"text": "".join(texts), "logprobs": {"tokens": texts, "token_logprobs": list(logprobs)}}


# -- time --------------------------------------------------------------------------------------------------------------

DRIPS = {
    "headers": dripping(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
    "a header without its end": dripping(b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
    "a body": dripping(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n{", b" "),
    "the body of an error": dripping(b"HTTP/1.1 500 Oh\r\nContent-Length: 9999\r\n\r\n", b"x"),
    "a line of the stream": dripping(HEAD + b"data: ", b"x"),
    "comments": dripping(HEAD, b": wait\n\n"),
    "chunks": dripping(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
}


@pytest.mark.parametrize("place", DRIPS)
def test_the_time_of_a_row_is_kept_wherever_a_server_drips(place: str) -> None:
    limit = "--max-time" if place == "chunks" else "--row-timeout"
    with running(fault=for_rows(DRIPS[place])) as server:
        began = time.monotonic()
        done = run(server, limit, "0.7", "bad", "Hi")
        assert time.monotonic() - began < 8  # the server drips for 20 s
        assert [record["finish_reason"] for record in done.records] == ["time", "eos"]


def test_the_time_of_a_scored_row_is_kept_too() -> None:
    with running(fault=for_rows(DRIPS["a body"])) as server:
        began = time.monotonic()
        words = ("score", "--backend", server.url, "--row-timeout", "0.7", "--format", "jsonl")
        done = genctl(*words, "bad", "I drink tea")
        assert time.monotonic() - began < 8  # the server drips for 20 s
        assert (done.status, done.records[1]["nll"]) == (1, 3.0)
        message = f"{server.url}: no score within row_timeout = 0.7 s"
        assert done.records[0]["error"] == {"code": "backend", "message": message}


def test_silence_is_the_time_without_an_answer_not_without_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SILENCE_S", 0.2)
    monkeypatch.setattr(client, "ATTEMPTS", 2)
    with running(fault=for_rows(DRIPS["comments"])) as server:
        done = run(server, "bad")
        assert done.records[0]["error"]["message"].startswith(f"{server.url}: no answer within 0.2 s")


@pytest.mark.parametrize("path", ["models", "probe"])
def test_the_probe_has_a_time_limit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genctl.engines.server.server.PROBE_S", 0.6)
    drip = DRIPS["a body"]
    wrong = {"wrong_models": drip} if path == "models" else {"fault": lambda server, body: drip}
    with running(**wrong) as server:
        began = time.monotonic()
        done = genctl("run", "--backend", server.url, "--scores", "Hi")
        assert time.monotonic() - began < 8
        assert (done.status, done.err) == (3, f"error: {server.url}: the probe got no answer within 0.6 s\n")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("301", "429 (it asks to wait 301 s)"),
        ("9" * 400, "429 (it asks to wait inf s)"),
        ("Fri, 31 Dec 9999 23:59:59 GMT", "429 (6 attempts)"),
        ("inf", "429 (6 attempts)"),
        ("-5", "429 (6 attempts)"),
    ],
)
def test_a_pause_that_is_too_long_or_is_none_costs_no_time(header: str, words: str) -> None:
    with running(fault=for_rows(Failure(429, headers={"Retry-After": header}))) as server:
        began = time.monotonic()
        done = run(server, "bad", "Hi")
        assert time.monotonic() - began < 8
        assert done.records[0]["error"]["message"] == f"{server.url}: {words}"
        assert done.records[1]["text"] == TEXT


def test_no_pause_goes_beyond_the_time_of_a_row() -> None:
    with running(fault=for_rows(Failure(503, headers={"Retry-After": "100"}))) as server:
        began = time.monotonic()
        done = run(server, "--row-timeout", "5", "bad")
        assert time.monotonic() - began < 5
        assert done.records[0]["error"]["message"] == f"{server.url}: 503 (it asks to wait 100 s)"


def test_a_wait_of_more_than_a_second_is_reported_once_for_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "NOTED_S", 0.3)
    left = [2]

    def fault(server: StandIn, body: Request) -> Failure | None:
        if body.get("stream") and left[0] > 0:
            left[0] -= 1
            return Failure(429, b'{"error": "slow down"}', headers={"Retry-After": "0.6"})
        return None

    with running(fault=fault) as server:
        done = run(server, "Hi", "You")
        assert (done.status, done.err) == (0, f"note: {server.url}: 429 slow down: trying again in 1 s\n")
        left[0] = 1
        assert run(server, "-q", "Hi").err == ""


# -- size --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@pytest.mark.parametrize("encoding", ["", "gzip", "deflate"])
def test_an_answer_has_a_greatest_size_after_decoding(
    kind: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 1 << 20)
    content = b"data: " + b" " * (3 << 20)
    packed = {"": content, "gzip": gzip.compress(content), "deflate": zlib.compress(content)}[encoding]
    bomb = Failure(200, packed, kind, headers={"Content-Encoding": encoding} if encoding else {})
    with running(fault=for_rows(bomb)) as server:
        done = run(server, "bad", "Hi")
        assert done.records[0]["error"]["message"] == f"{server.url}: the answer is larger than 1 MiB"
        assert done.records[1]["text"] == TEXT
        assert len(server.rows) == 2  # it is not sent again


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
@pytest.mark.parametrize("streams", [True, False])
def test_honest_encodings_are_read(encoding: str, streams: bool) -> None:
    content = answer(text=" a b" * 1000)
    content = b"data: " + content + b"\n\n" if streams else content
    packed = {"gzip": gzip.compress(content), "deflate": zlib.compress(content), "identity": content}[encoding]
    kind = "text/event-stream" if streams else "application/json"
    with running(fault=for_rows(Failure(200, packed, kind, headers={"Content-Encoding": encoding}))) as server:
        assert run(server, "bad").records[0]["text"] == " a b" * 1000


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("gzip", "the answer is not encoded as it says"),
        ("deflate", "the answer is not encoded as it says"),
        ("br", "the answer is encoded as br, which was not requested"),
        ("zstd, gzip", "the answer is encoded as zstd, gzip, which was not requested"),
    ],
)
def test_a_body_that_is_not_what_its_encoding_says_is_the_error_of_its_row(encoding: str, words: str) -> None:
    lie = Failure(200, answer(), headers={"Content-Encoding": encoding})
    with running(fault=for_rows(lie)) as server:
        done = run(server, "bad", "Hi")
        assert done.records[0]["error"]["message"] == f"{server.url}: {words} (6 attempts)"
        assert done.records[1]["text"] == TEXT


@pytest.mark.parametrize("charset", ["zip", "utf-16", "undefined", "\x7f"])
def test_a_charset_changes_nothing(charset: str) -> None:
    failure = Failure(400, b"no \xff way", f"text/plain; charset={charset}")
    good = Failure(200, answer(), f"application/json; charset={charset}")
    with running(fault=lambda server, body: {"bad": failure, "good": good}.get(str(body.get("prompt")))) as server:
        done = run(server, "bad", "good")
        assert done.records[0]["error"]["message"] == f"{server.url}: 400 no \ufffd way"
        assert done.records[1]["text"] == " a b"


# -- numbers -----------------------------------------------------------------------------------------------------------

WRONG_LOGPROBS = {
    "infinities": (float("inf"), float("-inf")),
    "above 0": (0.5, -1.0),
    "NaN": (float("nan"), -1.0),
    "a text": ("-0.5", -1.0),
    "a huge integer": (-(10**400), -1.0),
    "a sum beyond what a float holds": (-1.7e308, -1.7e308),
}


@pytest.mark.parametrize("name", WRONG_LOGPROBS)
def test_a_log_probability_that_cannot_be_true_is_null(name: str) -> None:
    wrong = Failure(200, answer(**scored(*WRONG_LOGPROBS[name])))
    with running(fault=for_rows(wrong)) as server:
        done = run(server, "--top-logprobs", "2", "bad", "Hi")
        bad, good = done.records
        assert (done.status, done.err) == (0, "")
        assert (bad["text"], bad["logprob"], bad["score"], bad["tokens"][0]["logprob"]) == (" a b", None, None, None)
        assert good["logprob"] == -3.0


@pytest.mark.parametrize("count", [10**400, -1, 1.5, True, "7", [], float("nan"), 2**60])
def test_a_count_that_cannot_be_true_is_unknown(count: object) -> None:
    body = {**json.loads(answer()), "usage": {"prompt_tokens": count, "completion_tokens": count}}
    with running(fault=for_rows(Failure(200, json.dumps(body).encode()))) as server:
        done = run(server, "bad", "Hi")
        assert (done.status, done.err) == (0, "")
        assert done.records[0]["usage"]["new_tokens"] == 1  # counted from the pieces of the answer
        assert done.records[1]["text"] == TEXT


ODD = {
    "no choices": {"choices": None},
    "a null choice": {"choices": [None]},
    "a null index": {"choices": [{"index": None, "text": "x", "finish_reason": "stop"}]},
    "2,000 choices": {"choices": [{"index": at, "text": "x", "finish_reason": "stop"} for at in range(2000)]},
    "a content that is a number": {"choices": [{"message": {"content": 1}, "finish_reason": "stop"}]},
    "choices that are an object": {"choices": {"0": 1}},
    "an index below 0": {"choices": [{"index": -1, "text": "x", "finish_reason": "stop"}]},
    "a huge index": {"choices": [{"index": 10**400, "text": "x", "finish_reason": "stop"}]},
    "a delta that is a text": {"choices": [{"delta": "x", "finish_reason": "stop"}]},
    "a reason that is a list": {"choices": [{"text": "x", "finish_reason": ["stop"]}]},
    "tokens that are numbers": {"choices": [{"text": "x", "logprobs": {"tokens": [1], "token_logprobs": [-1]}}]},
    "alternatives in a list": {
        "choices": [{"text": "x", "logprobs": {"tokens": ["x"], "token_logprobs": [-1], "top_logprobs": [[1]]}}]
    },
    "fewer numbers than tokens": {"choices": [{"text": "x", "logprobs": {"tokens": ["x"], "token_logprobs": []}}]},
    "content of numbers": {"choices": [{"message": {"content": "x"}, "logprobs": {"content": [1, 2]}}]},
}


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("name", ODD)
def test_an_answer_of_another_make_is_the_error_of_its_row(name: str, streams: bool) -> None:
    data = json.dumps(ODD[name]).encode()
    odd = (
        Failure(200, b"data: " + data + b"\n\ndata: [DONE]\n\n", "text/event-stream") if streams else Failure(200, data)
    )
    with running(fault=for_rows(odd)) as server:
        done = run(server, "bad", "Hi")
        assert (done.status, done.err) == (1, "")
        assert set(done.records[0]) == {"schema", "id", "error"}
        assert done.records[1]["text"] == TEXT


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [True, 2]},
        {"token_ids": [10**400]},
        {"token_ids": "ab"},
        {"logprobs": 7},
        {"logprobs": {"content": None, "tokens": None}},
        {"stop_reason": {"a": 1}},
        {"stop_reason": 10**400},
        {"finish_reason": "content_filter\x1b[31m" + "x" * 10_000},
        {"text": "lone \ud800 surrogate \udfff and \ud83d\ude00"},
    ],
)
def test_odd_fields_cost_no_row(choice: dict[str, object], tmp_path: Path) -> None:
    with running(fault=for_rows(Failure(200, answer(**choice)))) as server:
        output = tmp_path / "out.jsonl"
        done = run(server, "-o", str(output), "bad", "Hi")
        assert done.status == 0, done.err
        text = output.read_text(encoding="utf-8")
        assert "\x1b" not in text
        assert len(text) < 5000
        if "text" in choice:
            assert json.loads(text.splitlines()[0])["text"] == "lone \ufffd surrogate \ufffd and \U0001f600"


def test_a_row_that_nothing_foresaw_is_an_error_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from genctl.engines.server import row

    real = row.usage_of

    def fails(part: Request) -> object:
        if any(choice["finish_reason"] == "broken" for choice in part["choices"]):
            raise ZeroDivisionError("nobody thought of this")
        return real(part)

    monkeypatch.setattr(row, "usage_of", fails)
    with running(fault=for_rows(Failure(200, answer(finish_reason="broken")))) as server:
        done = run(server, "bad", "Hi")
        assert done.records[0]["error"]["message"].endswith("unexpected ZeroDivisionError: nobody thought of this")
        assert done.records[1]["text"] == TEXT


# -- more than was requested -------------------------------------------------------------------------------------------


def test_the_number_of_tokens_is_that_of_the_server_where_only_it_is_known() -> None:
    body = {**json.loads(answer()), "usage": {"completion_tokens": 50}}
    with running(logprobs=False, fault=for_rows(Failure(200, json.dumps(body).encode()))) as server:
        done = run(server, "-n", "8", "bad")
        assert (done.records[0]["usage"]["new_tokens"], done.err) == (50, "")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"choices": [{"index": 0, "text": " a"}]}, "it has 1025 parts for at most 8 tokens"),
        ({"choices": [{"index": 0, "delta": {"reasoning": "hm"}}]}, "it has 1025 parts for at most 8 tokens"),
        ({"choices": [], "usage": {"prompt_tokens": 1}}, "it has 1025 parts for at most 8 tokens"),
        ({"id": "x", "choices": [{"index": 1023, "text": " a"}]}, "the answer has more than 1 sequences"),
        ({"choices": [{"index": 0, "text": " a", "finish_reason": "stop"}]}, ""),
    ],
)
def test_a_stream_without_end_costs_no_time(part: Request, words: str) -> None:
    def write(send: Write) -> None:
        send(HEAD)
        while True:  # until the client has disconnected
            send((b"data: " + json.dumps(part).encode() + b"\n\n") * 100)

    with running(fault=for_rows(Failure(raw=write))) as server:
        began = time.monotonic()
        done = run(server, "-n", "8", "bad", "Hi")
        assert time.monotonic() - began < 8
        assert words in done.records[0].get("error", {}).get("message", "")
        assert ("error" in done.records[0]) is bool(words)
        assert done.records[1]["text"] == TEXT


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"detail": [{"loc": ["body"], "msg": "too long"}]}, "[{'loc': ['body'], 'msg': 'too long'}]"),
        ({"error": {"message": 7}}, "7"),
        ({"error": None, "message": "no"}, "no"),
        ([1, 2], ""),
        ("text", ""),
    ],
)
def test_the_message_of_a_refusal_is_found_in_any_form(body: object, words: str) -> None:
    with running(fault=for_rows(Failure(400, json.dumps(body).encode()))) as server:
        assert run(server, "bad").records[0]["error"]["message"] == f"{server.url}: 400 {words}".rstrip()


@pytest.mark.parametrize(
    ("proxy", "words", "hint"),
    [
        ("socks5://127.0.0.1:9", "the proxy of ALL_PROXY cannot be used: Using SOCKS proxy", "NO_PROXY"),
        ("ftp://127.0.0.1", "the proxy of ALL_PROXY cannot be used", "http://host:port"),
        ("http://127.0.0.1:999999", "", ""),
    ],
)
def test_a_proxy_that_cannot_be_used_is_one_line_that_names_its_variable(
    proxy: str, words: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    done = genctl("run", "--backend", "openai:http://192.0.2.1", "Hi")
    error, *advice = done.err.splitlines()
    assert (done.status, "bug" in done.err, len(advice)) == (3, False, int(bool(hint)))
    assert error.startswith(f"error: openai:http://192.0.2.1: {words}")
    assert hint in "".join(advice)


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("GENCTL_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("url", "goes"),
    [
        ("https://api.openai.com/v1", True),
        ("https://eu.api.openai.com", True),
        ("https://API.OPENAI.COM:443", True),
        ("http://api.openai.com", False),
        ("https://api.openai.com.evil.example", False),
        ("https://evilapi.openai.com", False),
        ("https://openai.com", False),
        ("http://127.0.0.1:8000", False),
    ],
)
def test_openais_key_goes_to_openai_alone(url: str, goes: bool, keys: pytest.MonkeyPatch) -> None:
    keys.setenv("OPENAI_API_KEY", "sesame")
    (address,) = read(f"openai:{url}")
    assert key_of(address)[0] == ("sesame" if goes else "")
    keys.setenv("GENCTL_API_KEY", "mine")
    assert key_of(address)[0] == "mine"


@pytest.mark.parametrize(
    ("url", "key", "noted"),
    [
        ("http://192.0.2.1:8000", "sesame", True),
        ("http://192.0.2.1:8000", "", False),
        ("https://192.0.2.1", "sesame", False),
        ("http://127.0.0.1:8000", "sesame", False),
        ("http://localhost:8000", "sesame", False),
    ],
)
def test_a_key_that_others_can_read_on_its_way_is_noted(
    url: str, key: str, noted: bool, keys: pytest.MonkeyPatch
) -> None:
    keys.setenv("GENCTL_API_KEY", key)
    lines: list[str] = []
    client = Client(read(f"openai:{url}")[0], lines.append)
    try:
        client.tick()
    finally:
        client.close()
    assert ["plain HTTP" in line for line in lines] == [True] * noted
    assert "sesame" not in "".join(lines)


def test_openais_key_goes_to_the_server_that_its_variable_names(keys: pytest.MonkeyPatch) -> None:
    keys.setenv("OPENAI_API_KEY", "sesame")
    with running(key="sesame") as server:
        done = genctl("run", "--backend", server.url, "Hi")
        assert (done.status, done.out) == (3, "")
        assert done.err == (
            f"error: {server.url}: 401 who are you? (a key is needed: set GENCTL_API_KEY; OPENAI_API_KEY is for "
            "api.openai.com or the server of OPENAI_BASE_URL)\n"
        )
        keys.setenv("OPENAI_BASE_URL", server.url.removeprefix("openai:") + "/v1")
        assert genctl("run", "--backend", server.url, "Hi").out == f"{TEXT}\n"
        keys.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        assert genctl("run", "--backend", server.url, "Hi").status == 3


def test_a_server_stores_nothing_here() -> None:
    seen: list[str] = []

    def write(send: Write) -> None:
        body = answer()
        head = f"HTTP/1.1 200 OK\r\nSet-Cookie: a=b; Path=/\r\nContent-Length: {len(body)}\r\n\r\n"
        send(head.encode() + body)

    with running(fault=lambda server, body: Failure(raw=write)) as server:
        server.on_headers = lambda headers: seen.append(headers.get("Cookie", ""))
        assert run(server, "--batch-size", "1", "Hi", "You", "He").status == 0
        assert len(seen) == 3
        assert set(seen) == {""}

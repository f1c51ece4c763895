"""A server that fails: which requests are retried, which become the error of a row, and which end the run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from genctl.engines.server import client
from tests.cli.tool import genctl
from tests.engines.server.stand_in import Body, Failure, StandIn, first_times, for_rows, running

TEXT = " one two three four five six"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_S", 0.001)


def run(server: StandIn, *arguments: str) -> tuple[int, list[Body], str]:
    done = genctl("run", "--backend", server.url, "--format", "jsonl", *arguments)
    return done.status, done.records, done.err


FAILURES = {
    "429": Failure(429, b'{"error": {"message": "too many"}}', headers={"Retry-After": "0.01"}),
    "500": Failure(500, b'{"error": {"message": "out of luck"}}'),
    "503 without a word": Failure(503, b"", "text/plain"),
    "a cut stream": Failure(cut_after=2),
    "a stream cut before its first token": Failure(cut_after=0),
    "wrong JSON": Failure(200, b'{"choices": ['),
    "no choices": Failure(200, b'{"choices": "none"}'),
    "a list": Failure(200, b"[]"),
    "HTML": Failure(200, b"<html>please log in</html>", "text/html"),
    "a broken event": Failure(200, b"data: {oops\n\n", "text/event-stream"),
    "an error in the stream": Failure(200, b'data: {"error": {"message": "engine died"}}\n\n', "text/event-stream"),
    "choices of another make": Failure(200, b'data: {"choices": [17]}\n\n', "text/event-stream"),
    "an empty stream": Failure(200, b"data: [DONE]\n\n", "text/event-stream"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_fails_at_first_is_tried_again(name: str) -> None:
    with running(fault=first_times(2, FAILURES[name])) as server:
        status, records, err = run(server, "Hi")
        assert (status, err) == (0, "")
        assert [record["text"] for record in records] == [TEXT]
        assert records[0]["logprob"] == -3.0
        assert len(server.rows) == 3


MESSAGES = {
    "429": "429 too many (6 attempts)",
    "500": "500 out of luck (6 attempts)",
    "503 without a word": "503 (6 attempts)",
    "a cut stream": "the answer was cut off before its end (6 attempts)",
    "wrong JSON": "the answer is not JSON but application/json (6 attempts)",
    "HTML": "the answer is not JSON but text/html (6 attempts)",
    "a broken event": "a part of the stream is not JSON (6 attempts)",
    "an error in the stream": "engine died (6 attempts)",
    "choices of another make": "the answer has another shape than OpenAI's (6 attempts)",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_row_that_always_fails_is_an_error_record_and_the_others_go_on(name: str) -> None:
    with running(fault=for_rows(FAILURES[name])) as server:
        status, records, _ = run(server, "Hi", "bad", "You")
        assert status == 1
        assert [record.get("text") for record in records] == [TEXT, None, TEXT]
        assert records[1]["error"] == {"code": "backend", "message": f"{server.url}: {MESSAGES[name]}"}
        assert sum(body["prompt"] == "bad" for body in server.rows) == client.ATTEMPTS


def test_a_request_that_is_refused_is_not_sent_again() -> None:
    refusal = Failure(400, b'{"error": {"message": "context length exceeded"}}')
    with running(fault=for_rows(refusal, "long")) as server:
        done = genctl("run", "--backend", server.url, "long", "Hi")
        assert (done.status, done.out) == (1, f"{TEXT}\n")
        assert done.err == f"error: prompt 1: {server.url}: 400 context length exceeded\n"
        assert len(server.rows) == 2


def test_the_wait_that_a_server_asks_for_is_kept() -> None:
    failure = Failure(429, b"", headers={"Retry-After": "0.4"})
    with running(fault=first_times(1, failure)) as server:
        began = time.monotonic()
        assert run(server, "Hi")[0] == 0
        assert time.monotonic() - began > 0.4


def test_waits_double_with_jitter() -> None:
    waits = [client.pause_s(attempt) / client.FIRST_S for attempt in range(1, 6)]
    assert all(2**place / 2 <= wait <= 2**place for place, wait in enumerate(waits))
    assert waits != [client.pause_s(attempt) / client.FIRST_S for attempt in range(1, 6)]
    assert client.pause_s(1, 12.0) == 12.0
    assert client.pause_s(1, 1e9) == client.WAITS_S
    assert client.pause_s(60) <= client.LONGEST_S
    assert client.retry_after("soon") is None
    assert client.retry_after("2.5") == 2.5


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"key": "sk-right"}, "who are you?"),
        ({"fault": lambda server, body: Failure(401, b'{"error": "expired"}')}, "expired"),
    ],
)
def test_a_key_that_is_missing_or_expires_ends_the_run_with_one_line(about: Body, words: str) -> None:
    with running(**about) as server:
        done = genctl("run", "--backend", server.url, "Hi", "You")
        assert (done.status, done.out) == (3, "")
        assert done.err == f"error: {server.url}: 401 {words} (a key is needed: set GENCTL_API_KEY)\n"


def test_a_server_without_plain_prompts_says_so() -> None:
    with running(fault=lambda server, body: Failure(404, b"") if "prompt" in body else None) as server:
        done = genctl("run", "--backend", server.url, "Hi")
        assert (done.status, done.err.splitlines()) == (
            3,
            [f"error: {server.url}: no plain prompts (404)", "hint: --chat sends each prompt as a chat"],
        )
        assert run(server, "--chat", "Hi")[1][0]["text"] == TEXT


def test_a_server_that_is_not_there_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"openai:http://127.0.0.1:{taken.getsockname()[1]}"
    done = genctl("run", "--backend", url, "Hi")
    assert (done.status, done.err) == (3, f"error: {url}: no connection: refused\n")


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Failure(200, b"<html>", "text/html"), "the answer is not JSON but text/html"),
        (Failure(200, b'{"data": []}'), "the server lists no model; name one with --model"),
        (Failure(404, b""), "404"),
        (Failure(302, b"", headers={"Location": "http://elsewhere/"}), "302 (another address: http://elsewhere/)"),
    ],
)
def test_what_is_no_such_server_is_said_before_anything_is_sent(failure: Failure, words: str) -> None:
    with running(wrong_models=failure) as server:
        done = genctl("run", "--backend", server.url, "Hi")
        assert (done.status, done.err) == (3, f"error: {server.url}: {words}\n")
        assert server.asked == []


def test_one_of_several_models_must_be_named() -> None:
    with running(models=("small", "large")) as server:
        for named, words in (
            ((), "the server has 2 models; name one with --model: small, large"),
            (("-m", "huge"), "there is no model huge; there are: small, large"),
        ):
            done = genctl("run", "--backend", server.url, *named, "Hi")
            assert (done.status, done.err) == (3, f"error: {server.url}: {words}\n")
        assert run(server, "-m", "large", "Hi")[1][0]["model"] == "large"


def test_a_server_that_is_busy_while_it_is_probed_is_not_misjudged() -> None:
    left = [1]

    def fault(server: StandIn, body: Body) -> Failure | None:
        if "logprobs" in body and not body.get("stream") and left[0]:
            left[0] -= 1
            return Failure(429, b'{"error": "too many"}')
        return None

    with running(fault=fault) as server:
        assert run(server, "--scores", "Hi")[1][0]["logprob"] == -3.0


def test_an_answer_that_is_cut_after_a_part_of_it_was_shown_is_an_error() -> None:
    with running(fault=first_times(1, Failure(cut_after=2))) as server:
        done = genctl("run", "--backend", server.url, "--stream", "Hi")
        assert done.status == 1
        assert done.err == f"error: {server.url}: the answer was cut off before its end\n"
        assert len(server.rows) == 1


def test_an_interrupted_run_keeps_what_there_is(tmp_path: Path) -> None:
    with running(fault=for_rows(Failure(slow_s=0.3), "slow")) as server:
        output = tmp_path / "out.jsonl"
        words = ["run", "--backend", server.url, "-o", str(output), "Hi", "slow"]
        process = subprocess.Popen([sys.executable, "-m", "genctl", *words], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 20
        while len(server.rows) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.7)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "interrupted" in err
        records = [json.loads(line) for line in output.read_text().splitlines()]
        assert [record["finish_reason"] for record in records] == ["eos", "interrupted"]
        assert records[1]["text"].startswith(" one")
        assert len(records[1]["text"]) < len(TEXT)


def test_a_slow_server_holds_nobody_else_up() -> None:
    """On the server two rows wait for each other, so both must be in flight at once."""
    meeting = threading.Barrier(2, timeout=10)

    def fault(server: StandIn, body: Body) -> Failure | None:
        if body.get("stream"):
            meeting.wait()
        return None

    with running(fault=fault) as server:
        status, records, _ = run(server, "Hi", "You")
        assert (status, len(records)) == (0, 2)

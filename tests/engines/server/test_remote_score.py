"""`genctl score --backend`: prompt log-probabilities, if the server returns them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from genctl.engines.server import client
from tests.cli.tool import genctl
from tests.engines.server.stand_in import Body, Failure, for_rows, running


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_S", 0.001)


def test_a_text_is_scored_by_the_server() -> None:
    """The stand-in gives the k-th word (from 0) the log-probability -k, and the first one none."""
    with running() as server:
        done = genctl("score", "--backend", server.url, "--format", "jsonl", "--scores", "I drink tea")
        assert done.status == 0, done.err
        (record,) = done.records
        assert {key: record[key] for key in ("nll", "tokens", "bytes", "model", "backend", "exact", "token_ids")} == {
            **{"nll": 3.0, "tokens": 2, "bytes": len(" drink tea"), "model": "tiny"},
            **{"backend": server.url, "exact": False, "token_ids": []},
        }
        assert record["ppl"] == pytest.approx(math.exp(1.5))
        assert [(one["text"], one["logprob"]) for one in record["scores"]] == [(" drink", -1.0), (" tea", -2.0)]
        body = server.asked[-1]
        assert (body["echo"], body["max_tokens"], body["prompt"]) == (True, 1, "I drink tea")


def test_a_context_is_read_but_not_scored() -> None:
    with running() as server:
        done = genctl("score", "--backend", server.url, "--format", "jsonl", "--context", "I drink", " green tea")
        (record,) = done.records
        assert (record["nll"], record["tokens"], record["text"], record["context"]) == (5.0, 2, " green tea", "I drink")


def test_candidates_are_ranked(tmp_path: Path) -> None:
    with running() as server:
        words = ("score", "--backend", server.url, "--rank", "--context", "I drink", "--format", "jsonl")
        done = genctl(*words, " more green tea", " tea")
        assert [(record["rank"], record["text"], record["candidate"]) for record in done.records] == [
            (1, " tea", 1),
            (2, " more green tea", 0),
        ]


def test_a_token_that_crosses_the_context_is_the_error_of_its_text() -> None:
    with running() as server:
        done = genctl("score", "--backend", server.url, "--format", "jsonl", "--context", "I dri", "nk tea", " or not")
        assert done.status == 1
        message = "the server reads the end of the context and the beginning of the text as one token"
        assert done.records[0]["error"] == {"code": "input", "message": message}
        assert done.records[1]["tokens"] == 2


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"logprobs": False}, "gives no log-probabilities of a prompt"),
        ({"echoes": False}, "gives no log-probabilities of a prompt"),
        ({"shift": 1.0}, "gives log-probabilities for a prompt that contradict those for generated text"),
    ],
)
def test_a_server_that_cannot_is_refused_before_the_first_text(about: Body, words: str) -> None:
    with running(**about) as server:
        done = genctl("score", "--backend", server.url, "Once upon")
        expected = f"error: {server.url}: genctl score needs prompt log-probabilities, but the server {words}\n"
        assert (done.status, done.err) == (3, expected)
        assert not any(body.get("prompt") == "Once upon" for body in server.asked)


@pytest.mark.parametrize(
    "flags", [("--add-eos",), ("--stride", "4"), ("--target", "x"), ("--tokenizer", "builtin:stories")]
)
def test_what_needs_the_tokenizer_is_refused(flags: tuple[str, ...]) -> None:
    with running() as server:
        done = genctl("score", "--backend", server.url, *flags, "Once upon")
        assert done.status == 2
        assert f"{flags[0]} cannot be done on a server" in done.err


def test_a_text_that_always_fails_is_an_error_record(tmp_path: Path) -> None:
    fault = for_rows(Failure(500, b'{"error": "out of luck"}'), "bad text")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a b", "bad text", "c d")))
    with running(fault=fault) as server:
        done = genctl("score", "--backend", server.url, "-i", str(rows), "--format", "jsonl")
        assert done.status == 1
        assert [record.get("nll") for record in done.records] == [1.0, None, 1.0]
        message = f"{server.url}: 500 out of luck ({client.ATTEMPTS} attempts)"
        assert done.records[1]["error"] == {"code": "backend", "message": message}


NO_SCORE = "the server has no score for a token in the middle of the text"


@pytest.mark.parametrize(
    "logprobs",
    [
        *([None, wrong, -1.0] for wrong in (float("inf"), float("-inf"), -(10**400), True, "x", 0.5)),
        [None, -1.0, None],
    ],
)
def test_a_number_that_is_missing_or_cannot_be_true_is_the_error_of_its_text(logprobs: list[object]) -> None:
    listed = {"tokens": ["a", " bad", " text"], "token_logprobs": logprobs}
    wrong = Failure(200, json.dumps({"choices": [{"text": "a bad text", "logprobs": listed}]}).encode())
    with running(fault=for_rows(wrong, "a bad text")) as server:
        done = genctl("score", "--backend", server.url, "--format", "jsonl", "a bad text", "I drink tea")
        assert done.status == 1
        assert done.records[0]["error"] == {"code": "input", "message": NO_SCORE}
        assert done.records[1]["nll"] == 3.0

"""The thought that a server returns apart from the answer: in records, events and chats, and cut by the limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genctl.engines.server.answer import pieces_of
from tests.cli.tool import genctl
from tests.engines.server.stand_in import Body, Failure, StandIn, running

THOUGHT = (" let", " me", " see")
TEXT = " one two three four five six"


@pytest.fixture
def server() -> Iterator[StandIn]:
    with running(thought=THOUGHT) as stand_in:
        yield stand_in


def ask(server: StandIn, *arguments: str) -> Any:
    return genctl("run", "--backend", server.url, "--chat", "--format", "jsonl", *arguments, "Why?")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("lists", [True, False])
def test_the_thought_is_in_the_record_and_no_token_is_invented(field: str, lists: bool) -> None:
    with running(thought=THOUGHT, thought_field=field, lists_thought=lists) as server:
        done = ask(server, "--scores")
        assert (done.status, done.err) == (0, "")
        (record,) = done.records
        assert (record["text"], record["finish_reason"]) == (TEXT, "eos")
        assert record["thinking"] == {"tokens": 3 if lists else None, "cut": False, "text": " let me see"}
        assert record["usage"]["new_tokens"] == 9
        assert [token["logprob"] for token in record["tokens"]] == [-0.5] * (9 if lists else 6)
        assert "".join(token["text"] for token in record["tokens"]) == TEXT
        # sums over the listed tokens
        assert (record["logprob"], record["score"]) == ((-4.5, -0.5) if lists else (-3.0, -0.5))


def test_a_thought_that_the_limit_cuts_says_so(server: StandIn) -> None:
    for limit, text, cut in ((2, "", True), (3, "", True), (4, " one", False)):
        done = ask(server, "-n", str(limit))
        (record,) = done.records
        assert (record["text"], record["finish_reason"]) == (text, "length")
        assert record["thinking"] == {"tokens": None, "cut": cut, "text": "".join(THOUGHT[:limit])}
        assert record["usage"]["new_tokens"] == limit
        assert record["logprob"] == (None if cut else -0.5)
        words = f"the thought has not ended, so there is no answer: cut by length after {limit} tokens"
        assert (words in done.err) is cut


def test_events_have_the_thought(server: StandIn, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    for live in ((), ("--stream",)):
        words = ("--chat", "--events", str(events), "--force", *live, "Why?")
        assert genctl("run", "--backend", server.url, *words).out.strip() == TEXT.strip()
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        assert lines[-1]["hypotheses"][0]["thought_text"] == " let me see"
        grown = "".join(row.get("thought", "") for line in lines for row in line.get("rows", ()))
        assert grown == (" let me see" if live else "")


def test_a_whole_answer_has_a_thought_too() -> None:
    whole = {
        "choices": [
            {
                "index": 0,
                "message": {"content": " a b", "reasoning_content": "hm", "reasoning": "hm"},
                "finish_reason": "stop",
                "logprobs": {
                    "content": [{"token": text, "logprob": -1.0} for text in ("<t>", "hm", "</t>", " a", " b")]
                },
            }
        ],
        "usage": {"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 3}},
    }
    with running(fault=lambda server, body: Failure(200, json.dumps(whole).encode())) as server:
        (record,) = ask(server, "--scores").records
        assert record["thinking"] == {"tokens": 3, "cut": False, "text": "hm"}
        assert (record["text"], record["logprob"]) == (" a b", -5.0)
        assert [token["text"] for token in record["tokens"]] == ["", "", "", " a", " b"]


@pytest.mark.parametrize(
    ("message", "text", "thought"),
    [
        ({"content": "a", "reasoning": None, "reasoning_content": ""}, "a", ""),
        ({"content": None, "thinking": "hm"}, "", "hm"),
        ({"content": "a", "reasoning": {"effort": "low"}}, "a", ""),
    ],
)
def test_thoughts_come_in_many_forms(message: Body, text: str, thought: str) -> None:
    (piece,) = pieces_of({"choices": [{"message": message, "finish_reason": "stop"}]}, 0)
    assert ("".join(token.text for token in piece.tokens), piece.thought) == (text, thought)


def test_a_chat_in_a_pipe_has_the_thought_in_its_record(server: StandIn) -> None:
    options = ("--backend", server.url, "--format", "jsonl")
    done = genctl("chat", *options, "-n", "2", stdin="Hello\nMore\n")
    assert [record["thinking"]["cut"] for record in done.records] == [True, True]
    assert [record["text"] for record in done.records] == ["", ""]
    assert len(server.rows[-1]["messages"]) == 3

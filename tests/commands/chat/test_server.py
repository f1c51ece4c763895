"""A chat with a server: the messages are sent, and what needs token ids is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.tool import genctl
from tests.commands.chat.talk import Talk
from tests.engines.server.stand_in import StandIn, running


@pytest.fixture
def server() -> Iterator[StandIn]:
    with running() as stand_in:
        yield stand_in


def test_the_messages_of_all_turns_are_sent(server: StandIn, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    options = ("--backend", server.url, "--system", "Be kind.", "--format", "jsonl", "--save", str(file))
    done = genctl("chat", *options, stdin="Hello\nMore\n")
    assert done.status == 0, done.err
    first, second = done.records
    assert (first["text"], first["backend"]) == (" one two three four five six", server.url)
    assert "reused_tokens" not in first["usage"]
    assert server.rows[1]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "More"},
    ]
    assert second["id"] == "1"
    again = genctl("chat", "--open", str(file), "--backend", server.url, "--format", "jsonl", stdin="Again\n")
    assert again.status == 0, again.err
    assert len(server.rows[2]["messages"]) == 6


def test_the_seeds_are_those_of_a_chat_here(server: StandIn) -> None:
    options = ("--do-sample", "--seed", "5", "--format", "jsonl")
    there = genctl("chat", "--backend", server.url, *options, stdin="A\nB\n").records
    here = genctl("chat", *options, "-n", "2", stdin="A\nB\n").records
    assert [record["seed"] for record in there] == [record["seed"] for record in here]


def test_a_server_that_fails_leaves_the_turn_unsaid(server: StandIn) -> None:
    from tests.engines.server.stand_in import Failure

    server.fault = lambda stand_in, body: (
        Failure(400, b'{"error": {"message": "no"}}') if body["messages"][-1]["content"] == "Bad" else None
    )
    done = genctl("chat", "--backend", server.url, "--format", "jsonl", stdin="Hello\nBad\nMore\n")
    assert done.status == 1
    assert "error" in done.records[1]
    assert [message["content"] for message in server.rows[-1]["messages"]][::2] == ["Hello", "More"]


def test_what_needs_token_ids_is_refused_at_a_prompt(server: StandIn, own_state: Path) -> None:
    with Talk(own_state, "--backend", server.url) as talk:
        assert "with a server there is no /prompt" in " ".join(talk.lines)
        assert talk.say("Hello")[0] == " one two three four five six"
        refused = "error: /prompt needs the token ids of a checkpoint, which servers do not report"
        assert talk.say("/prompt") == [refused]
        assert talk.say("/set no_repeat_ngram_size=2")[0].startswith("error: ")
        talk.say("/undo")
        talk.say("Bye")
        assert [message["content"] for message in server.rows[-1]["messages"]] == ["Bye"]


def test_the_thought_of_a_server_is_dimmed_and_not_sent_back(own_state: Path) -> None:
    thought = (" let", " me", " see")
    with running(thought=thought) as server, Talk(own_state, "--backend", server.url, width=100) as talk:
        said = talk.say("Hello")
        assert said[0] == " let me see"
        assert "one two three four five six" in " ".join(said)
        talk.say("More")
        # the thought is not part of the conversation
        assert server.rows[-1]["messages"][1] == {"role": "assistant", "content": " one two three four five six"}

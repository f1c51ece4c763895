"""More sequences than a server returns at once, ids that it lists, and no probes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.tool import Done, genctl
from tests.engines.server.stand_in import Body, Failure, StandIn, for_rows, running


def run(server: StandIn, *arguments: str) -> Done:
    return genctl("run", "--backend", server.url, "--format", "jsonl", *arguments)


@pytest.mark.parametrize(("slots", "requests"), [(1, [8, 4, 2, *[1] * 8]), (4, [8, 4, 4]), (3, [8, 4, 2, 2, 2, 2])])
def test_more_sequences_than_slots_are_several_requests(slots: int, requests: list[int]) -> None:
    """Regression: the server answered 400, and the row failed."""
    words = ("--do-sample", "--seed", "5", "--num-return-sequences", "8")
    with running(slots=slots, owner="llamacpp") as server:
        done = run(server, *words, "Hi")
        assert (done.status, done.err) == (0, "")
        assert [body.get("n", 1) for body in server.rows] == requests
        assert [record["sequence"] for record in done.records] == list(range(8))
        seeds = [record["seed"] for record in done.records]
        answered = [body for body in server.rows if body.get("n", 1) <= slots]
        sent = [body["seed"] for body in answered for _ in range(body.get("n", 1))]
        assert [seed % (2**31 - 1) for seed in seeds] == sent
        assert len(set(seeds)) == len(answered)
        # the seed of a sequence that was requested alone repeats it
        if slots == 1:
            again = run(server, "--do-sample", "--seed", str(seeds[5]), "Hi")
            assert again.records[0]["text"] == done.records[5]["text"]


def test_the_next_row_knows_what_the_server_gives(tmp_path: Path) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("Hi\nYou\nHe\n")
    words = ("--do-sample", "--seed", "5", "--num-return-sequences", "4", "--batch-size", "1", "-i", str(rows))
    with running(slots=2, owner="llamacpp") as server:
        done = run(server, *words)
        assert len(done.records) == 12
        assert [body.get("n", 1) for body in server.rows] == [4, 2, 2, 2, 2, 2, 2]
        assert run(server, *words).out == done.out


def test_what_is_refused_for_another_reason_changes_nothing(tmp_path: Path) -> None:
    """A prompt that is too long is refused whatever the number of sequences."""
    rows = tmp_path / "rows.txt"
    rows.write_text("long\nHi\n")

    fault = for_rows(Failure(400, b'{"error": {"message": "too long"}}'), "long")
    words = ("--do-sample", "--seed", "5", "--num-return-sequences", "4", "--batch-size", "1", "-i", str(rows))
    with running(fault=fault) as server:
        done = run(server, *words)
        assert done.status == 1
        assert done.records[0]["error"]["message"] == f"{server.url}: 400 too long"
        assert [body.get("n", 1) for body in server.rows] == [4, 2, 1, 4]
        assert len(done.records) == 5


def test_ids_that_are_listed_with_tokens_are_those_of_the_text() -> None:
    with running(owner="llamacpp", listed_ids=True) as server:
        for chat in ((), ("--chat",)):
            (record,) = run(server, *chat, "--top-logprobs", "2", "-n", "3", "Hi").records
            assert record["token_ids"] == [104, 104, 106]
            assert record["usage"]["new_tokens"] == 3
            first = record["tokens"][0]
            assert (first["id"], first["rank"], first["top"]) == (104, 1, [[104, " one", -0.5], [7, "?", -2.0]])


def test_ids_are_unknown_where_the_server_lists_fewer_tokens_than_it_counts() -> None:
    def fault(server: StandIn, body: Body) -> Failure | None:
        reason, count = {"eos": ("stop", 3), "lost": ("stop", 4), "length": ("length", 3)}.get(
            body["prompt"], ("stop", 2)
        )
        listed = {"content": [{"id": 5, "token": " a", "logprob": -1}] * 2}
        choice = {"index": 0, "text": " a a", "logprobs": listed, "finish_reason": reason}
        return Failure(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": count}}).encode())

    with running(fault=fault) as server:
        records = run(server, "whole", "eos", "lost", "length").records
        assert [record["token_ids"] for record in records] == [[5, 5], [5, 5], [], []]
        assert [record["usage"]["new_tokens"] for record in records] == [2, 3, 4, 3]
        stopped = run(server, "--stop-strings", "zz", "eos").records[0]
        assert (stopped["token_ids"], stopped["usage"]["new_tokens"]) == ([], 3)


@pytest.mark.parametrize(
    ("arguments", "rows", "probes"),
    [
        (("Hi",), 1, 0),
        (("--chat", "Hi"), 1, 0),
        (("--do-sample", "Hi", "You"), 2, 0),
        (("--scores", "Hi", "You"), 2, 1),
    ],
)
def test_a_run_asks_nothing_that_it_does_not_need(arguments: tuple[str, ...], rows: int, probes: int) -> None:
    with running() as server:
        assert run(server, *arguments).status == 0
        assert (len(server.rows), len(server.asked)) == (rows, rows + probes)


def test_a_server_that_refuses_log_probabilities_is_asked_again_without(tmp_path: Path) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("".join(f"prompt {place}\n" for place in range(12)))
    with running(logprobs=False) as server:
        done = run(server, "-i", str(rows), "--batch-size", "3")
        assert (done.status, done.err, len(done.records)) == (0, "", 12)
        assert all(record["logprob"] is None for record in done.records)
        assert sum("logprobs" not in body for body in server.rows) == 12

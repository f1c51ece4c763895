"""`--explain`: what each processor did, as data and on a terminal."""

from __future__ import annotations

import pytest

from tests.cli.tool import genctl

ASKED = ("run", "-m", "builtin:numbers", "1207", "--do-sample", "--top-p", "0.9", "--repetition-penalty", "1.3",
         "--seed", "4", "-n", "6", "--explain")  # fmt: skip


def test_a_record_holds_a_trace_for_each_token_in_the_order_of_the_processors() -> None:
    (record,) = genctl(*ASKED, "--format", "jsonl").records
    for token in record["tokens"]:
        assert [trace["processor"] for trace in token["trace"]] == ["repetition_penalty", "top_k", "top_p"]
        for trace in token["trace"]:
            assert set(trace) == {"processor", "removed", "moved", "changed", "before", "after"}
            assert 0 <= trace["moved"] <= 1
            assert trace["removed"] >= 0
    nucleus = record["tokens"][0]["trace"][-1]
    assert nucleus["removed"] > 0
    assert nucleus["after"] >= nucleus["before"]


def test_the_trace_is_equal_from_run_to_run() -> None:
    assert genctl(*ASKED, "--format", "jsonl").raw == genctl(*ASKED, "--format", "jsonl").raw


def test_a_terminal_shows_each_step_and_a_table_over_the_run_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")  # no animation, so that the lines are what is seen
    done = genctl(*ASKED, terminal=True)
    assert done.status == 0
    assert "top_p" in done.out
    assert "mass moved" in done.out
    assert "What the processors did" in done.err
    assert all(len(line) <= 80 for line in (done.out + done.err).splitlines())


def test_a_pipe_keeps_the_text_plain_and_tells_the_rest_on_stderr() -> None:
    done = genctl(*ASKED)
    plain = genctl(*ASKED[:-1])
    assert done.out == plain.out
    assert "top_p" in done.err

"""What ended a text, in records and recordings; texts of a grammar that the budget cuts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genctl import events
from genctl.commands.recording import read_recording
from tests.cli.tool import genctl

GIRL = ("run", "Once upon", "--seed", "1", "--format", "jsonl", "-n", "30")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("flags", "stop"),
    [
        (("--stop-strings", " girl"), {"kind": "string", "what": " girl"}),
        (("--stop-regex", "g.rl"), {"kind": "regex", "what": "g.rl"}),
        (("--set", "stop_token_ids=[695]"), {"kind": "token", "what": "695"}),
        (("--set", "stop_mean_logprob=-0.01"), {"kind": "floor", "what": "mean log-probability"}),
        (
            ("--set", "stop_repeat_ngram=1", "--set", 'logit_bias={"#93"=200.0}'),
            {"kind": "repetition", "what": "1-gram"},
        ),
    ],
)
def test_a_record_says_which_criterion_stopped_it(flags: tuple[str, ...], stop: dict[str, str]) -> None:
    done = genctl(*GIRL, *flags)
    (record,) = done.records
    assert record["finish_reason"] == "stop"
    assert record["stop"]["kind"] == stop["kind"]
    assert stop["what"] in record["stop"]["what"]


def test_records_that_no_criterion_stopped_have_none() -> None:
    assert "stop" not in genctl("run", "Once upon", "-n", "3", "--format", "jsonl").records[0]
    beams = genctl("beam", "Once upon", "--stop-strings", " girl", "-n", "12", "--format", "jsonl").records
    assert all(("stop" in record) == (record["finish_reason"] == "stop") for record in beams)


def test_comparisons_say_it_too() -> None:
    done = genctl(
        "compare",
        "Once upon",
        "--strategy",
        'a:stop_strings=" girl"',
        "--strategy",
        "b:max_new_tokens=4",
        "--format",
        "jsonl",
    )
    first, second = done.records
    assert first["stop"] == {"kind": "string", "what": " girl"}
    assert "stop" not in second


def test_a_recording_from_before_there_was_a_kind_is_read(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    genctl(*GIRL, "--stop-strings", " girl", "--events", str(trace))
    old = tmp_path / "old.jsonl"
    lines = []
    for line in trace.read_text().splitlines():
        event = json.loads(line)
        for one in [*event.get("hypotheses", []), *(ended["hypothesis"] for ended in event.get("ended", []))]:
            assert one.pop("kind") == "string"
            one["stop"] = 'string " girl"'
        lines.append(json.dumps(event))
    old.write_text("".join(f"{line}\n" for line in lines))

    def causes(path: Path) -> list[str]:
        finished = [event for event in read_recording(str(path)) if isinstance(event, events.Finished)]
        return [one.cause for event in finished for one in event.hypotheses]

    assert causes(old) == causes(trace) == ['string " girl"']


def test_what_stopped_a_text_comes_back_from_json() -> None:
    one = events.Hypothesis((1,), -1.0, -1.0, "stop", stop="x", kind="string", incomplete="regex")
    finished = events.Finished("0", (one,))
    assert events.from_json(events.to_json(finished)) == finished


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_a_text_of_a_grammar_that_is_cut_is_told_even_when_quiet(quiet: tuple[str, ...]) -> None:
    done = genctl("run", "--json-schema", SCHEMA, "-n", "9", "--seed", "1", *quiet, stdin="Once upon\nThe\n")
    assert done.status == 0
    lines = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    said = "json_schema: the text is incomplete, cut by length after 9 tokens"
    assert lines == [f"warning: prompt {row}: {said}" for row in (1, 2)]
    assert genctl("run", "One", "--json-schema", SCHEMA, "-n", "9", "--fail-on", "length").status == 4


def test_a_comparison_tells_it_with_the_run() -> None:
    runs = ("--strategy", "a:max_new_tokens=9", "--strategy", "b:max_new_tokens=20")
    done = genctl("compare", "One", *runs, "--json-schema", SCHEMA, "--format", "jsonl")
    assert "warning: run a: json_schema: the text is incomplete" in done.err
    assert "run b" not in done.err


def test_a_text_that_fits_is_whole_and_nothing_is_said() -> None:
    done = genctl("run", "--json-schema", SCHEMA, "-n", "16", "--seed", "1", "-q", stdin="Once upon\nThe\n")
    assert (done.status, done.err) == (0, "")
    for line in done.out.splitlines():
        assert set(json.loads(line)) == {"name", "age"}


def test_a_budget_that_no_text_fits_is_refused_before_anything_is_written() -> None:
    done = genctl("run", "One", "--json-schema", SCHEMA, "-n", "4")
    assert (done.status, done.out) == (2, "")
    assert "error: json_schema: no text of it fits in 4 tokens" in done.err
    rows = '{"prompt": "One", "params": {"max_new_tokens": 4}}\n{"prompt": "One"}\n'
    done = genctl(
        "run",
        "-i",
        "-",
        "--input-format",
        "jsonl",
        "--json-schema",
        SCHEMA,
        "-n",
        "20",
        "--format",
        "jsonl",
        stdin=rows,
    )
    assert done.status == 1
    assert "no text of it fits in 4 tokens" in done.records[0]["error"]["message"]
    assert done.records[1]["finish_reason"] == "eos"


def test_rows_of_a_batch_are_closed_as_alone(tmp_path: Path) -> None:
    prompts = "".join(f"Prompt {number} and so\n" for number in range(6))
    (tmp_path / "in.txt").write_text(prompts)
    flags = (
        "--json-schema",
        SCHEMA,
        "-n",
        "17",
        "--do-sample",
        "--seed",
        "3",
        "--format",
        "jsonl",
        "--batch-size",
        "2",
    )
    whole = genctl("run", "-i", str(tmp_path / "in.txt"), *flags)
    alone = genctl("run", "-i", str(tmp_path / "in.txt"), *flags[:-1], "1")
    assert [one["token_ids"] for one in whole.records] == [one["token_ids"] for one in alone.records]
    for record in whole.records:
        json.loads(record["text"])

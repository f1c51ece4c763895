"""A recording (`--events`) is read back line by line, and every line is checked before it is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genctl import events
from genctl.commands.recording import read_recording
from genctl.events import to_json
from tests.cli.tool import genctl, ok
from tests.terminal.beams import search

GOOD = json.dumps({"event": "began", "lane": "0", "prompt": "p", "strategy": "beam"})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nonsense\n", "line 2: not JSON: expected a value at column 1"),
        ("[1, 2]\n", "line 2: an event is a JSON object"),
        ('{"event": "danced", "lane": "0"}\n', "line 2: unknown event 'danced'"),
        ('{"event": "finish", "lane": "0"}\n', "line 2: unknown event 'finish'; did you mean finished?"),
        ('{"lane": "0"}\n', 'line 2: "event": expected the name of an event such as "began", got nothing'),
        ('{"event": "failed", "lane": "0"}\n', "line 2: code and message: expected here, but missing"),
        ('{"event": "prefilled", "lane": "0", "prompt_tokens": "x"}\n',
         "line 2: prompt_tokens: expected a whole number, got a string"),
        (
            '{"event": "stepped", "lane": "0", "step": 0, "rows": [{"lane": "0", "parent": 3, "written": [],'
            ' "logprob": 0.0, "total": 0.0}]}\n',
            "line 2: lane '0': a row continues row 3",
        ),
        (f"{'[' * 100_000}\n", "line 2: nested too deeply"),
        ('{"event": "\udcff"}\n', "line 2: byte 12 is not UTF-8"),
        ('{"event": "finished", "lane": "0", "prompt_tokens": ' + "1" * 5000 + "}\n",
         "line 2: a number has too many digits"),
        (f"{GOOD[:-5]}\n", "line 2: "),  # in the middle of a file it is not a half-written line
    ],
)  # fmt: skip
def test_a_damaged_line_is_named_before_anything_is_shown(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD}\n{line}", errors="surrogateescape")
    done = genctl("report", str(path))
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"error: {path}, {why}")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_a_run_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    done = genctl("report", str(path))
    assert done.status == 2
    assert "holds no recorded run" in done.err


def test_an_events_file_is_never_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    done = genctl("run", "One day", "-n", "2", "--events", str(tmp_path / "link"))
    assert done.status == 2
    assert "the output exists already" in done.err
    assert (tmp_path / "precious").read_text() == "mine"
    assert genctl("run", "One day", "-n", "2", "--events", "a\0b").status == 2


@pytest.mark.parametrize("cut", [20, 1])
def test_a_torn_recording_is_read_up_to_the_tear(cut: int, tmp_path: Path) -> None:
    lines = [json.dumps(to_json(event)).encode() + b"\n" for event in search()]
    torn, whole = tmp_path / "t.jsonl", tmp_path / "whole.jsonl"
    torn.write_bytes(b"".join(lines)[: -1 - cut])
    whole.write_bytes(b"".join(lines[:-1]))
    done = genctl("report", str(torn), "-q")
    assert f"note: {torn}, line {len(lines)}: the line is cut short: the recording was interrupted here" in done.err
    assert done.status == 0
    assert read_recording(str(torn), lambda note: None) == read_recording(str(whole))


def test_a_tear_within_a_character_is_a_tear_and_nothing_else_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(GOOD.encode() + b'\n{"event": "failed", "lane": "\xc3')
    assert "line 2: the line is cut short" in genctl("report", str(trace)).err
    trace = tmp_path / "t.jsonl"
    trace.write_text(GOOD[:-5])
    done = genctl("report", str(trace))
    assert (done.status, done.out) == (2, "")
    assert "line 1: the line is cut short" in done.err


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
        "compare", "Once upon", "--strategy", 'a:stop_strings=" girl"', "--strategy", "b:max_new_tokens=4", "--format",
        "jsonl",
    )  # fmt: skip
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


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_a_text_of_a_grammar_that_is_cut_is_told_even_when_quiet(quiet: tuple[str, ...]) -> None:
    done = ok("run", "--json-schema", SCHEMA, "-n", "9", "--seed", "1", *quiet, stdin="Once upon\nThe\n")
    lines = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    said = "json_schema: the text is incomplete, cut by length after 9 tokens"
    assert lines == [f"warning: prompt {row}: {said}" for row in (1, 2)]
    assert genctl("run", "One", "--json-schema", SCHEMA, "-n", "9", "--fail-on", "length").status == 4


def test_a_comparison_tells_it_with_the_run() -> None:
    runs = ("--strategy", "a:max_new_tokens=9", "--strategy", "b:max_new_tokens=20")
    done = genctl("compare", "One", *runs, "--json-schema", SCHEMA, "--format", "jsonl")
    assert "warning: run a: json_schema: the text is incomplete" in done.err
    assert "run b" not in done.err


def test_a_budget_that_no_text_fits_is_refused_before_anything_is_written() -> None:
    done = genctl("run", "One", "--json-schema", SCHEMA, "-n", "4")
    assert (done.status, done.out) == (2, "")
    assert "error: json_schema: no text of it fits in 4 tokens" in done.err
    rows = '{"prompt": "One", "params": {"max_new_tokens": 4}}\n{"prompt": "One"}\n'
    done = genctl(
        "run", "-i", "-", "--input-format", "jsonl", "--json-schema", SCHEMA, "-n", "20", "--format", "jsonl",
        stdin=rows,
    )  # fmt: skip
    assert done.status == 1
    assert "no text of it fits in 4 tokens" in done.records[0]["error"]["message"]
    assert done.records[1]["finish_reason"] == "eos"

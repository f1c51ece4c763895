"""`genctl beam` on a terminal and in a pipe."""

from __future__ import annotations

import json
from pathlib import Path

import pyte
import pytest

from tests.cli.tool import genctl, ok

NUMBERS = ("-m", "builtin:numbers")


def planned(*arguments: str) -> str:
    """What --dry prints about num_beams."""
    lines = genctl("beam", *NUMBERS, "--dry", *arguments).out.splitlines()
    return " ".join(next(line for line in lines if line.startswith("num_beams ")).split())


def test_five_beams_unless_something_else_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned() == "num_beams = 5 # genctl beam"
    assert planned("--num-beams", "3") == "num_beams = 3 # flag --num-beams"
    preset = tmp_path / "two.toml"
    preset.write_text("num_beams = 2\n")
    assert planned("-p", str(preset)).startswith("num_beams = 2 # ")
    monkeypatch.setenv("GENCTL_NUM_BEAMS", "4")
    assert planned() == "num_beams = 4 # GENCTL_NUM_BEAMS"


def test_one_beam_is_no_search() -> None:
    done = genctl("beam", *NUMBERS, "12", "--num-beams", "1")
    assert done.status == 2
    assert done.err.splitlines()[0] == "error: genctl beam shows a search, but num_beams = 1 (flag --num-beams)"


def test_the_n_best_have_scores_and_their_path_through_the_beam(gpt2: Path) -> None:
    arguments = ("beam", "-m", str(gpt2), "hello there", "-n", "6", "--num-return-sequences", "3", "--seed", "1")
    done = ok(*arguments, "--format", "jsonl", "--scores", "--top-logprobs", "2")
    assert [record["sequence"] for record in done.records] == [0, 1, 2]
    scores = [record["score"] for record in done.records]
    assert scores == sorted(scores, reverse=True)
    for record in done.records:
        ids = record["token_ids"]
        assert len(record["parents"]) == len(ids)
        assert record["parents"][0] == 0
        assert [token["id"] for token in record["tokens"]] == ids
        assert sum(token["logprob"] for token in record["tokens"]) == pytest.approx(record["logprob"], abs=1e-4)
        assert all(len(token["top"]) == 2 for token in record["tokens"])
    table = genctl(*arguments, "--format", "tsv")
    header, *lines = [line.split("\t") for line in table.out.splitlines()]
    assert [float(line[header.index("score")]) for line in lines] == scores


def test_parents_lead_from_step_to_step_through_the_recorded_rows(gpt2: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    done = genctl("beam", "-m", str(gpt2), "hello", "-n", "8", "--events", str(trace), "--format", "jsonl")
    told = [json.loads(line) for line in trace.read_text().splitlines()]
    (record,) = done.records
    steps = [event for event in told if event["event"] == "stepped"]
    row = None
    for step, parent, token in zip(steps, record["parents"], record["token_ids"], strict=False):
        assert row is None or parent == row
        here = [(place, one) for place, one in enumerate(step["rows"]) if one["parent"] == parent]
        row = next((place for place, one in here if one["written"][0]["id"] == token), None)
    assert row is None  # the last token ended it
    began = told[0]
    assert began["settings"] == {"num_beams": 5, "length_penalty": 1.0, "runtime": "native"}


def test_a_run_with_beams_tells_parents_and_a_greedy_one_does_not() -> None:
    assert "parents" in genctl("run", *NUMBERS, "7", "--num-beams", "2", "--format", "jsonl").records[0]
    assert "parents" not in genctl("run", *NUMBERS, "7", "--format", "jsonl").records[0]


def test_on_a_terminal_text_table_and_formula_stay() -> None:
    done = ok("beam", *NUMBERS, "1207", "--color", "never", terminal=True)
    shown = done.out[done.out.rindex("one thousand two hundred seven\n") :]
    assert "★    1" in done.out
    assert "score = total / tokens ** length_penalty = " in done.out
    assert shown
    assert "rank  from" in done.out  # it moved


@pytest.mark.parametrize("variable", [("TERM", "dumb"), ("NO_COLOR", "1")])
def test_a_dumb_terminal_is_not_animated_and_no_colour_is_none(
    variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*variable)
    done = genctl("beam", *NUMBERS, "1207", terminal=True)
    if variable[0] == "TERM":
        assert done.out.startswith("1207\none thousand two hundred seven\n\n  rank")
        assert "\x1b" not in done.out
    else:
        assert "\x1b[3" not in done.out
        assert "\x1b[1m" not in done.out


def test_quiet_leaves_the_text_and_the_table_without_the_formula() -> None:
    done = genctl("beam", *NUMBERS, "1207", "-q", "--color", "never", terminal=True)
    assert "★    1" in done.out
    assert "length_penalty =" not in done.out
    assert done.err == ""
    done = genctl("beam", *NUMBERS, "12", "7", "--color", "never", terminal=True)
    assert done.out.count("score = total") == 2


def test_the_tree_goes_beside_the_text_or_takes_its_place() -> None:
    beside = genctl("beam", *NUMBERS, "12", "--tree")
    assert beside.out == "twelve\n"
    assert beside.err.startswith("12\n 1 ┠─ ")
    text = genctl("beam", *NUMBERS, "12", "--tree-format", "text")
    assert text.out.rstrip("\n") == beside.err.rstrip("\n")
    trees = json.loads(genctl("beam", *NUMBERS, "12", "13", "--tree-format", "json").out)
    assert [tree["prompt"] for tree in trees] == ["12", "13"]
    assert {node["state"] for tree in trees for node in tree["nodes"]} >= {"root", "inner", "returned", "died"}


def test_a_failed_prompt_has_an_error_where_its_tree_would_be() -> None:
    stdin = "12\n\n7\n"
    done = genctl("beam", *NUMBERS, "--tree-format", "json", stdin=stdin)
    assert done.status == 1
    assert [list(tree)[-1] for tree in json.loads(done.out)] == ["nodes", "error", "nodes"]
    done = genctl("beam", *NUMBERS, "--tree-format", "text", stdin=stdin)
    assert (done.status, done.out.count("▸ best continuation")) == (1, 2)
    assert "empty" in done.err


@pytest.mark.parametrize("command", ["run", "beam"])
def test_streamed_texts_are_those_of_the_run(command: str, gpt2: Path) -> None:
    arguments = (command, "-m", str(gpt2), "-n", "12", "--seed", "3", "--echo")
    stdin = "one two\nthree\nfour five six\n"
    plain = genctl(*arguments, stdin=stdin)
    assert genctl(*arguments, "--stream", stdin=stdin).out == plain.out
    assert genctl(*arguments, "--stream", stdin=stdin, terminal=True).out.count("\n") == plain.out.count("\n")


def test_all_sequences_are_streamed_past_what_fails() -> None:
    done = genctl("beam", *NUMBERS, "--stream", stdin="5\n\n6\n")
    assert (done.status, done.out) == (1, "five\nsix\n")
    assert "empty" in done.err
    arguments = ("beam", *NUMBERS, "12", "7", "--num-return-sequences", "3", "--echo")
    assert genctl(*arguments, "--stream").out == genctl(*arguments).out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--stream", "--format", "jsonl"), "--format jsonl writes whole records"),
        (("--stream", "--output", "x.txt"), "--output keeps results"),
        (("--stream", "--unordered"), "--unordered writes results"),
        (("--stream", "--tree-format", "json"), "--tree-format json writes trees"),
        (("--tree-format", "json", "--format", "tsv"), "contradicts --format tsv"),
        (("--tree-format", "text", "--echo"), "--echo begins texts"),
        (("--penalty-alpha", "0.6"), "num_beams = 5"),
    ],
)
def test_what_contradicts_is_refused_in_a_sentence(arguments: tuple[str, ...], why: str) -> None:
    done = genctl("beam", *NUMBERS, "12", *arguments)
    assert (done.status, done.out) == (2, "")
    assert why in done.err
    assert done.err.startswith("error: ")


def settled(out: str) -> list[str]:
    """The final content of a screen of 80 columns."""
    screen = pyte.HistoryScreen(80, 24, history=1000)
    pyte.Stream(screen).feed(out.replace("\n", "\r\n"))
    gone = ["".join(line[column].data for column in range(80)) for line in screen.history.top]
    return [line.rstrip() for line in (*gone, *screen.display)]

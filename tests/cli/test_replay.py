"""`genctl replay`: a recording is a run that can be shown again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from genctl.commands.run import replay as command
from genctl.events import Event, Failed, to_json
from tests.cli.tool import genctl
from tests.terminal.beams import search
from tests.terminal.streams import lane

NUMBERS = ("-m", "builtin:numbers")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    paces: list[float] = []
    monkeypatch.setattr(command.time, "sleep", paces.append)
    return paces


def recorded(path: Path, told: Iterator[Event] | list[Event]) -> str:
    path.write_text("".join(json.dumps(to_json(event)) + "\n" for event in told))
    return str(path)


@pytest.mark.parametrize("of", ["run", "beam"])
def test_a_recorded_run_looks_as_it_did(of: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "t.jsonl")
    live = genctl(of, *NUMBERS, "12", "--events", trace, "-q", "--color", "never", terminal=True)
    again = genctl("replay", trace, "-q", "--color", "never", terminal=True)
    assert again.status == 0
    text = live.out[live.out.rindex("twelve") :]
    assert again.out[again.out.rindex("twelve") :].startswith(text)


def test_a_pipe_gets_the_texts(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t.jsonl", [*search(), *lane("1", [["a", "b"], ["c"]])])
    done = genctl("replay", trace)
    assert (done.status, done.out, done.err) == (0, " the old badger sang under the hill.\nab\nc\n", "")
    assert genctl("replay", "-", stdin=Path(trace).read_text()).out == done.out


def test_a_search_comes_back_with_its_table_and_formula(tmp_path: Path, no_waiting: list[float]) -> None:
    trace = recorded(tmp_path / "t.jsonl", search(told=False))
    done = genctl("replay", trace, "--speed", "4", "--color", "never", terminal=True)
    assert "★    1    -0.329" in done.out
    assert "✗    4" in done.out  # three rows were kept, as they show
    assert "-2.300 / 7 ** 1.0 = -0.329" in done.out
    assert no_waiting == [command.STEP_S / 4] * 7
    assert "tok/s" not in done.err  # nobody knows
    assert "7 tokens · ended by itself\n" in done.err  # no seed: a beam search draws nothing


def test_independent_rows_come_back_as_a_run(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t.jsonl", lane("0", [["a", "b"]]))
    assert genctl("replay", trace, "--color", "never", terminal=True).out == "Under the old oakab\n"
    assert genctl("replay", trace, "--color", "never", "--no-echo", terminal=True).out == "ab\n"
    assert genctl("replay", trace).out == "ab\n"


def test_the_tree_can_be_had_of_any_recording(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t.jsonl", search())
    beside = genctl("replay", trace, "--tree")
    assert beside.out == " the old badger sang under the hill.\n"
    assert "★ 1 · score -0.329" in beside.err
    assert genctl("replay", trace, "--tree-format", "text").out.splitlines() == beside.err.splitlines()
    assert json.loads(genctl("replay", trace, "--tree-format", "json").out)[0]["id"] == "0"
    assert "★ 1 · score -0.329" in genctl("replay", trace, "--tree", "--color", "never", terminal=True).out
    run = recorded(tmp_path / "r.jsonl", lane("0", [["a", "b"]]))
    assert "▸ ab  ★ 1" in genctl("replay", run, "--tree").err


def test_scores_and_prompts_can_be_shown_again(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t.jsonl", lane("0", [["a", "b"]], trace=True))
    done = genctl("replay", trace, "--scores", "--explain", "--echo")
    assert done.out == "Under the old oakab\n"
    assert "probability" in done.err
    assert "What the processors did" in done.err


def test_a_recording_that_ends_early_shows_what_there_is(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t.jsonl", list(lane("0", [["a", "b", "c"]]))[:4])
    done = genctl("replay", trace)
    assert (done.status, done.out) == (1, "ab\n")
    assert done.err == "error: the recording ends before 1 of its prompts are done\n"
    done = genctl("replay", trace, "--color", "never", "--no-echo", terminal=True)
    assert done.out == "ab\n"
    assert "not finished" in done.err


def test_failures_are_told_again(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t.jsonl", [*lane("0", [["a"]]), Failed("1", "input", "empty prompt")])
    done = genctl("replay", trace)
    assert (done.status, done.out) == (1, "a\n")
    assert "empty prompt" in done.err


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
        (
            '{"event": "prefilled", "lane": "0", "prompt_tokens": "x"}\n',
            "line 2: prompt_tokens: expected a whole number, got a string",
        ),
        (
            '{"event": "stepped", "lane": "0", "step": 0, "rows": [{"lane": "0", "parent": 3, "written": [],'
            ' "logprob": 0.0, "total": 0.0}]}\n',
            "line 2: lane '0': a row continues row 3",
        ),
        (f"{'[' * 100_000}\n", "line 2: nested too deeply"),
    ],
)
def test_a_damaged_line_is_named_before_anything_is_shown(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD}\n{line}")
    done = genctl("replay", str(path))
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"error: {path}, {why}")


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"event": "\xff"}\n')
    assert "line 2: byte 12 is not UTF-8" in genctl("replay", str(path)).err


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_a_run_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    done = genctl("replay", str(path))
    assert done.status == 2
    assert "holds no recorded run" in done.err


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    done = genctl("replay", str(tmp_path / "gone"))
    assert (done.status, done.err) == (2, f"error: cannot read {tmp_path / 'gone'}: No such file or directory\n")


@pytest.mark.parametrize(
    ("arguments", "terminal", "why"),
    [
        (("--step",), False, "--step is for a terminal"),
        (("--speed", "2"), False, "--speed is for a terminal"),
        (("--speed", "0"), True, "--speed 0: must be above 0"),
        (("--speed", "nan"), True, "--speed nan: must be above 0"),
        (("--step", "--speed", "2"), True, "leave out one"),
        (("--tree-format", "json", "--speed", "2"), True, "shows no steps"),
        (("--tree-format", "text", "--echo"), True, "--echo begins texts"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], terminal: bool, why: str, tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t.jsonl", search())
    done = genctl("replay", trace, *arguments, terminal=terminal)
    assert done.status == 2
    assert why in done.err


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_step_of_several_prompts_says_of_which(tmp_path: Path) -> None:
    import pexpect

    both = [*search(lane="0"), *search(lane="1")]
    trace = recorded(tmp_path / "t.jsonl", both)
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    arguments = ["-m", "genctl", "replay", trace, "--step", "--color", "never"]
    child = pexpect.spawn(sys.executable, arguments, env=environment, encoding="utf-8", timeout=30, dimensions=(24, 80))
    steps = sum(json.loads(line)["event"] == "stepped" for line in Path(trace).read_text().splitlines())
    for step in range(1, steps):
        child.expect_exact(f"step {step} of {steps} (prompt {1 if 2 * step <= steps else 2})")
        child.send(" ")
    child.send("q")
    child.expect(pexpect.EOF)
    child.close()


def test_step_by_step_each_key_is_one_step_and_q_ends(tmp_path: Path) -> None:
    import pexpect

    trace = recorded(tmp_path / "t.jsonl", search())
    arguments = ["-m", "genctl", "replay", trace, "--step", "--color", "never"]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    child = pexpect.spawn(sys.executable, arguments, env=environment, encoding="utf-8", timeout=30, dimensions=(24, 80))
    child.expect_exact("-2.500   one")
    child.expect_exact("q: end")
    child.send(" ")
    child.expect_exact("-1.050   a fox")
    child.send("\n")
    child.expect_exact("a fox sat")
    steps = sum(json.loads(line)["event"] == "stepped" for line in Path(trace).read_text().splitlines())
    child.expect_exact(f"step 3 of {steps}")
    child.send("b")
    child.expect_exact("-1.050   a fox")
    child.expect_exact(f"step 2 of {steps}")
    child.send(" ")
    child.expect_exact(f"step 3 of {steps}")
    child.send("xq")  # other keys do nothing
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert "slept" not in child.before
    assert "not finished" not in child.before
    assert f"stopped at step 3 of {steps}" in child.before


def test_an_events_file_is_never_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    done = genctl("run", "One day", "-n", "2", "--events", str(tmp_path / "link"))
    assert done.status == 2
    assert "the output exists already" in done.err
    assert (tmp_path / "precious").read_text() == "mine"
    assert genctl("run", "One day", "-n", "2", "--events", "a\0b").status == 2


def test_a_number_of_too_many_digits_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "events").write_text('{"event": "finished", "lane": "0", "prompt_tokens": ' + "1" * 5000 + "}\n")
    done = genctl("replay", str(tmp_path / "events"))
    assert done.status == 2
    assert "line 1: a number has too many digits" in done.err


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("cut", [20, 1])
def test_a_torn_recording_is_shown_up_to_the_tear(tmp_path: Path, terminal: bool, cut: int) -> None:
    trace = Path(recorded(tmp_path / "t.jsonl", search()))
    lines = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join(lines[:-1]) + lines[-1][:-1][:-cut])
    done = genctl("replay", str(trace), terminal=terminal, color="never")
    assert f"note: {trace}, line {len(lines)}: the line is cut short: the recording was interrupted here" in done.err
    assert done.status == (0 if terminal else 1)
    whole = tmp_path / "whole.jsonl"
    whole.write_bytes(b"".join(lines[:-1]))
    assert genctl("replay", str(whole), terminal=terminal, color="never").out == done.out


def test_a_tear_within_a_character_is_a_tear(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(GOOD.encode() + b'\n{"event": "failed", "lane": "\xc3')
    assert "line 2: the line is cut short" in genctl("replay", str(trace)).err


def test_a_recording_of_nothing_but_a_torn_line_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(GOOD[:-5])
    done = genctl("replay", str(trace))
    assert (done.status, done.out) == (2, "")
    assert "line 1: the line is cut short" in done.err


def test_a_bad_line_in_the_middle_is_no_tear(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(GOOD + "\n" + GOOD[:-5] + "\n")
    assert genctl("replay", str(trace)).status == 2

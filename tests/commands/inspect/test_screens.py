"""A cache on the screen at 80 columns; `tests/terminal/test_screens.py` has other widths."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from rich.cells import cell_len
from rich.text import Text

from genctl.commands.inspect import report
from genctl.commands.inspect.measurement import Measurement
from genctl.errors import percent, size
from genctl.events import Began, CacheRead, Event, Finished, Given, Hypothesis, Prefilled, Row, Stepped, Token
from tests import screens
from tests.cli.tool import ROOT
from tests.terminal.streams import STORY, console, written
from tests.warm import python

SCREENS = Path(__file__).parent / "screens"


def check_screen(name: str, text: str) -> None:
    screens.check_screen(SCREENS / f"{name}.txt", text)


def show(lines: list[Text]) -> str:
    out = console(80)
    for line in lines:
        assert cell_len(line.plain) <= 80
        out.print(line)
    return written(out)


def layer(number: int, kind: str, rows: int, length: int, **more: Any) -> dict[str, Any]:
    size = rows * 8 * length * 64 * 2 * 2
    made = {"layer": number, "kind": kind, "shape": [rows, 8, length, 64], "dtype": "bfloat16", "device": "cuda:0"}
    return {**made, "bytes": size, "new": 1, **more}


def hybrid(rows: int, length: int) -> tuple[dict[str, Any], ...]:
    """48 layers: five with windows, one full, and so on, and two recurrent ones at the end."""
    found = []
    for number in range(46):
        if number % 6 == 5:
            found.append(layer(number, "full", rows, length))
        else:
            found.append(layer(number, "sliding window", rows, min(length, 15), window=16))
    states = {"conv": [rows, 1024, 4], "recurrent": [rows, 1024, 16]}
    for number in (46, 47):
        found.append({**layer(number, "recurrent state", rows, 1, states=states), "shape": [rows, 1024, 16]})
    return tuple(found)


def seq2seq(rows: int, length: int) -> tuple[dict[str, Any], ...]:
    own = [layer(number, "full", rows, length) for number in range(6)]
    cross = [layer(number, "cross-attention", 1, 12, new=12 if length == 1 else 0) for number in range(6)]
    return (*own, *cross)


def stream(layers: Any, rows: int, prompt: int, steps: int, moves: dict[int, tuple[int, ...]]) -> Iterator[Event]:
    """A run whose rows fork after the prompt and are reordered according to `moves`."""
    yield Began("0", "Under the old \x1b[31moak[/red]", "beam", "some/checkpoint", 7)
    ids = tuple(range(100, 100 + prompt))
    given_ = Given((ids,), 0, tuple(range(prompt)), (tuple(range(prompt)),), None)
    yield CacheRead("0", 0, layers(1, prompt), given_, ("0",), (), 10_000_000)
    yield Prefilled("0", prompt, 0.1)
    for step in range(1, steps + 1):
        parents = moves.get(step, tuple(range(rows)) if step > 1 else (0,) * rows)
        yield Stepped(
            "0",
            step - 1,
            tuple(Row("0", parent, (Token(step, -0.5, STORY[step]),), -1.0, -1.0) for parent in parents),
        )
        past = prompt + step - 1
        fed = tuple((200 + step * 10 + row,) for row in range(rows))
        given_ = Given(fed, past, (past,), ((past,),), None)
        yield CacheRead("0", step, layers(rows, past + 1), given_, ("0",) * rows, moves.get(step, ()), 10_000_000)
    tokens = tuple(range(steps + 1))
    yield Finished("0", (Hypothesis(tokens, -1.0, -1.0, "length", text="".join(STORY[: steps + 1])),), prompt)


def report_of(layers: Any, rows: int, prompt: int, moves: dict[int, tuple[int, ...]]) -> dict[str, Any]:
    found, beside = Measurement(4), Measurement(4)
    for event in stream(layers, rows, prompt, 4, moves):
        found.feed(event)
        if isinstance(event, CacheRead):
            assert event.given is not None
            fed = tuple((*range(100, 100 + event.given.past_length), *row) for row in event.given.input_ids)
            fed = tuple(row[-prompt - event.step :] for row in fed)
            bare = Given(fed, 0, tuple(range(len(fed[0]))), (tuple(range(len(fed[0]))),), None)
            event = CacheRead("0", event.step, (), bare, event.lanes)
        beside.feed(event)
    return found.report(2_500_000_000, "dynamic", beside=beside)


MOVES = {2: (0, 0, 2), 4: (2, 1, 0)}


def test_layers_sums_and_passes() -> None:
    many = show(report.report_lines(report_of(hybrid, 3, 20, MOVES), 80))
    two = show(report.report_lines(report_of(seq2seq, 3, 1, MOVES), 80))
    check_screen("report_80", many + "\n" + two)


def test_what_each_pass_was_given() -> None:
    causal = show(report.input_lines(report_of(hybrid, 6, 20, {3: (0, 0, 1, 2, 2, 5)}), 80))
    both = show(report.input_lines(report_of(seq2seq, 3, 1, MOVES), 80))
    check_screen("given_80", causal + "\n" + both)


def test_equal_neighbours_are_one_line() -> None:
    layers = [layer(number, "full" if number < 40 else "static", 1, 9, filled=7) for number in range(48)]
    lines = [line.plain.split()[:2] for line in report.layer_lines({"layers": layers}, None)]
    assert lines == [["layer", "kind"], ["0-39", "full"], ["40-47", "static"]]


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (None, "not ended"),
        ({"reason": "steps", "steps": 8}, "ended after all 8 steps"),
        ({"reason": "steps", "steps": 0}, "ended after 0 steps"),
        ({"reason": "eos", "steps": 3}, "ended by eos after 3 steps"),
        ({"reason": "eos", "steps": 1}, "ended by eos after 1 step"),
        ({"reason": "stop", "steps": 2, "stop": "\x1b."}, "ended by stop ␛. after 2 steps"),
        ({"reason": "interrupted", "steps": 2}, "interrupted after 2 steps"),
        ({"reason": "length", "steps": 3}, "ended after 3 steps: all tokens were written"),
    ],
)
def test_why_it_ended_is_said(ended: dict[str, Any] | None, words: str) -> None:
    assert report.ended_words(ended) == words


def test_sizes_and_shares_stay_short() -> None:
    assert [size(number) for number in (0, 1, 1023, 1024, 5 * 2**20, 3 * 2**40, 5 * 2**50)] == [
        "0 bytes", "1 byte", "1,023 bytes", "1.0 KiB", "5.0 MiB", "3.0 TiB", "5120.0 TiB",
    ]  # fmt: skip
    assert [size(64 << 20, 0), size(1 << 20, of=10 << 20), size(3, of=9)] == ["64 MiB", "1.0/10.0 MiB", "3/9 bytes"]
    assert [percent(share) for share in (0.0, 0.0001, 0.752, 1.0, math.nan)] == [
        "0.0%",
        "<0.1%",
        "75.2%",
        "100.0%",
        "–",
    ]
    assert [percent(share, significant=4) for share in (0.0, 3.1e-6, 0.312, 1.0)] == ["0%", "3.1e-04%", "31.2%", "100%"]


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_real_terminal(variables: dict[str, str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment |= {"TERM": "xterm-256color", **variables}
    program, *rest = python()
    child = pexpect.spawn(
        program, [*rest, "-m", "genctl", "inspect-cache", "-m", "builtin:numbers", "7", "--steps", "2"],
        env=environment, cwd=str(tmp_path), dimensions=(40, 80), timeout=90, encoding="utf-8",
    )  # fmt: skip
    text = child.read()
    child.close()
    assert child.exitstatus == 0, text
    assert "layer  kind" in text
    assert ("\x1b[" in text) == (variables.get("TERM") != "dumb")

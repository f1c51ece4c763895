"""What a person sees of a cache: screens as text at 60, 80 and 120 columns, never wider or taller than the terminal."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from genctl.commands.inspect import report
from genctl.commands.inspect.inputs import input_lines
from genctl.commands.inspect.measurement import Measurement
from genctl.errors import percent, size
from genctl.events import Began, CacheRead, Event, Finished, Given, Hypothesis, Prefilled, Row, Stepped, Token
from tests import screens
from tests.cli.test_process import ROOT
from tests.terminal.streams import STORY, console, written
from tests.warm import python

SCREENS = Path(__file__).parent / "screens"


def check_screen(name: str, text: str) -> None:
    screens.check_screen(SCREENS / f"{name}.txt", text)


def show(lines: list[Text], width: int) -> str:
    out = console(width)
    for line in lines:
        assert cell_len(line.plain) <= width
        out.print(line)
    return written(out)


def layer(number: int, kind: str, rows: int, length: int, **more: Any) -> dict[str, Any]:
    size = rows * 8 * length * 64 * 2 * 2
    made = {"layer": number, "kind": kind, "shape": [rows, 8, length, 64], "dtype": "bfloat16", "device": "cuda:0"}
    return {**made, "bytes": size, "new": 1, **more}


def hybrid(rows: int, length: int) -> tuple[dict[str, Any], ...]:
    """48 layers: five windows, one full layer and so on, and two recurrent ones at the end."""
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
    """A run whose rows fork after the prompt and are reordered as `moves` says."""
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


@pytest.mark.parametrize("width", [60, 80, 120])
def test_layers_sums_and_passes(width: int) -> None:
    many = show(report.report_lines(report_of(hybrid, 3, 20, MOVES), width), width)
    two = show(report.report_lines(report_of(seq2seq, 3, 1, MOVES), width), width)
    check_screen(f"report_{width}", many + "\n" + two)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_what_each_pass_was_given(width: int) -> None:
    causal = show(input_lines(report_of(hybrid, 6, 20, {3: (0, 0, 1, 2, 2, 5)}), width), width)
    both = show(input_lines(report_of(seq2seq, 3, 1, MOVES), width), width)
    check_screen(f"given_{width}", causal + "\n" + both)


LAYER = st.sampled_from(
    [
        layer(0, "full", 2, 9),
        layer(0, "sliding window", 2, 3, window=8),
        layer(0, "static", 1, 40, filled=7),
        layer(0, "recurrent state", 1, 1, states={"conv": [1, 2, 3]}),
        {
            "layer": 0,
            "kind": "recurrent state",
            "shape": [1],
            "dtype": "float32",
            "device": "cpu",
            "bytes": 4,
            "new": 1,
        },
        layer(0, "full", 1, 1, value_shape=[1, 8, 1, 128]),
        layer(0, "cross-attention", 1, 5, new=0),
    ]
)


@given(kinds=st.lists(LAYER, max_size=60), most=st.integers(1, 30))
def test_groups_hold_every_layer_once(kinds: list[dict[str, Any]], most: int) -> None:
    layers = [{**one, "layer": number} for number, one in enumerate(kinds)]
    groups = report.grouped(layers, most)
    assert sorted(one["layer"] for group in groups for one in group) == list(range(len(layers)))
    for group in groups:
        assert all({**one, "layer": 0} == {**group[0], "layer": 0} for one in group)


def test_equal_neighbours_are_one_line_and_many_alternating_ones_two() -> None:
    def labels(layers: list[dict[str, Any]], most: int = 24) -> list[str]:
        return [report.label_of(group) for group in report.grouped(layers, most)]

    assert labels([layer(number, "full", 1, 9) for number in range(48)]) == ["0-47"]
    mixed = [layer(number, ("full", "static")[number % 2], 1, 9) for number in range(48)]
    assert labels(mixed) == ["0,2…46", "1,3…47"]
    assert labels(mixed[:4]) == ["0", "1", "2", "3"]
    assert labels(mixed[:4], 3) == ["0,2", "1,3"]


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (None, "not ended"),
        ({"reason": "steps", "steps": 8}, "ended after all 8 steps"),
        ({"reason": "steps", "steps": 0}, "ended after the prefill"),
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
    assert [report.share(part) for part in (0.00004, 0.0123, 0.25)] == ["0.004%", "1.2%", "25.0%"]


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

"""What a person sees of a cache: screens as text at 60, 80 and 120 columns, never wider or taller than the terminal."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from genctl.commands.inspect import cache_inputs, cache_norms, cache_report, prompt_diff
from genctl.commands.inspect.cache_view import CacheView, picture
from genctl.commands.inspect.measurement import Measurement
from genctl.errors import percent, size
from genctl.events import Began, CacheRead, Event, Finished, Given, Hypothesis, Prefilled, Row, Stepped, Token
from genctl.terminal import theme
from tests import screens
from tests.cli.test_process import ROOT
from tests.cli.tool import genctl
from tests.terminal.streams import STORY, Clock, Terminal, console, written
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
    many = show(cache_report.report_lines(report_of(hybrid, 3, 20, MOVES), width), width)
    two = show(cache_report.report_lines(report_of(seq2seq, 3, 1, MOVES), width), width)
    check_screen(f"report_{width}", many + "\n" + two)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_what_each_pass_was_given(width: int) -> None:
    causal = show(cache_inputs.given_lines(report_of(hybrid, 6, 20, {3: (0, 0, 1, 2, 2, 5)}), width), width)
    both = show(cache_inputs.given_lines(report_of(seq2seq, 3, 1, MOVES), width), width)
    check_screen(f"given_{width}", causal + "\n" + both)


@pytest.mark.parametrize("width", [80, 120])
def test_the_heatmap_and_the_diff(width: int) -> None:
    def values(shift: int, gone: int) -> list[float | None]:
        return [None if place < gone else 0.1 * ((place * 7 + shift) % 50) + 12 * (place == 0) for place in range(30)]

    layers = [{"layer": 0, "keys": values(0, 22), "values": values(3, 22)}]
    layers.append({"layer": 1, "keys": [1234.5, *values(5, 0)[1:]], "values": values(9, 0)})
    tokens = ["<bos>", "\x1b[2J", "\n", "漢字漢字", *STORY[:26]]
    part = {"positions": list(range(30)), "tokens": tokens, "layers": layers}
    cross = {
        "positions": [0, 1],
        "tokens": [" the", "e"],
        "layers": [{"layer": 0, "keys": [1.0, 2.0], "values": [0.0, 0.001]}],
    }
    text = show(cache_norms.heatmap_lines({**part, "cross": cross}, width), width)
    diff = {
        "prompt": "Under the old oak and more of it", "prompt_tokens": 9, "common_tokens": 5,
        "common_text": "Under the old", "part": [" willow", ""], "reused_tokens": 5, "share_reused": 5 / 9,
        "spared_bytes": 123456, "tokens_agree": True, "reason": "a recurrent state cannot be cut back " * 3,
        "with_reuse": {"prompt_tokens_read": 4, "passes": 1}, "without_reuse": {"prompt_tokens_read": 9, "passes": 2},
    }  # fmt: skip
    check_screen(f"norms_{width}", text + "\n" + show(prompt_diff.diff_lines(diff, width), width))


def test_colour_and_number_say_the_same() -> None:
    layers = [{"layer": 0, "keys": [1.0, 4.0], "values": [2.0, None]}]
    lines = cache_norms.heatmap_lines({"positions": [0, 1], "tokens": ["a", "b"], "layers": layers}, 80)
    keys, values = (line for line in lines if line.plain.lstrip().startswith("0 "))
    assert not keys.style  # only the label is dim
    assert [span.style for span in keys.spans[1:]] == [theme.colour(0.25), theme.colour(1.0)]
    assert keys.plain.split() == ["0", "k", "1.00", "4.00"]
    assert [span.style for span in values.spans[1:]] == [theme.colour(1.0), theme.DIM]
    assert values.plain.split() == ["0", "v", "2.00", "·"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_cache_fills_on_the_screen(width: int) -> None:
    terminal, clock = Terminal(width, 20), Clock()
    seen = []
    with CacheView(terminal.console, console(width), live=True, steps=20, clock=clock) as view:
        view.weights = 2_500_000_000
        for event in stream(hybrid, 3, 20, 20, MOVES):
            clock.now += 0.1
            view.feed(event)
            if isinstance(event, CacheRead) and event.step in (0, 1, 12, 20):
                seen.append("\n".join(line for line in terminal.visible() if line))
    check_screen(f"filling_{width}", f"\n{'=' * width}\n".join(seen) + "\n")
    assert terminal.everything().strip() == ""  # the picture is gone, for the table to be printed


def test_it_is_redrawn_when_50_ms_have_passed() -> None:
    terminal, clock = Terminal(80, 20), Clock()
    with CacheView(terminal.console, console(), live=True, steps=8, clock=clock) as view:
        drawn = []
        for event in stream(hybrid, 1, 4, 8, {}):
            clock.now += 0.015
            before = len(written(terminal.console))
            view.feed(event)
            if isinstance(event, CacheRead):
                drawn.append(len(written(terminal.console)) > before)
    # a pass every 30 ms
    assert drawn == [True, False, True, False, True, False, True, False, True]


def test_nothing_is_animated_where_it_may_not_be() -> None:
    out = console(80)
    with CacheView(out, console(80), live=True, steps=8) as view:
        for event in stream(hybrid, 1, 4, 8, {}):
            view.feed(event)
    assert written(out) == ""


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


@settings(max_examples=80, deadline=None)
@given(kinds=st.lists(LAYER, max_size=60), width=st.integers(20, 160), height=st.integers(1, 40))
def test_the_picture_always_fits(kinds: list[dict[str, Any]], width: int, height: int) -> None:
    layers = tuple({**one, "layer": number} for number, one in enumerate(kinds))
    read = CacheRead("0", 1, layers, Given(((5,),), 8, (8,)), ("0",), (), 0)
    lines = picture(read, 1, 8, 1000, "\x1b[2J some text\n" * 9, width, height)
    assert len(lines) <= height
    assert all(cell_len(line.plain) <= width for line in lines)
    assert not any("\x1b" in line.plain or "\n" in line.plain for line in lines)


@given(kinds=st.lists(LAYER, max_size=60), most=st.integers(1, 30))
def test_groups_hold_every_layer_once(kinds: list[dict[str, Any]], most: int) -> None:
    layers = [{**one, "layer": number} for number, one in enumerate(kinds)]
    groups = cache_report.grouped(layers, most)
    assert sorted(number for group in groups for number in group.numbers) == list(range(len(layers)))
    assert sum(group.bytes for group in groups) == sum(one["bytes"] for one in layers)
    for group in groups:
        assert all({**layers[number], "layer": 0} == {**group.layer, "layer": 0} for number in group.numbers)


def test_equal_neighbours_are_one_line_and_many_alternating_ones_two() -> None:
    same = [layer(number, "full", 1, 9) for number in range(48)]
    assert [group.label for group in cache_report.grouped(same)] == ["0-47"]
    mixed = [layer(number, ("full", "static")[number % 2], 1, 9) for number in range(48)]
    assert [group.label for group in cache_report.grouped(mixed, 24)] == ["0,2…46", "1,3…47"]
    assert len(cache_report.grouped(mixed, 48)) == 48


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
    assert cache_report.ended_words(ended) == words


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
    assert [cache_report.share(part) for part in (0.00004, 0.0123, 0.25)] == ["0.004%", "1.2%", "25.0%"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_whole_program_on_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "30")
    asked = (
        "inspect-cache",
        "12",
        "-m",
        "builtin:numbers",
        "--steps",
        "3",
        "--num-beams",
        "2",
        "--inputs",
        "--heatmap",
    )
    done = genctl(*asked, "--diff", "13", terminal=True, color="never")
    assert done.status == 0, done.err
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.out)
    assert all(cell_len(line.replace("\r", "")) <= width for line in plain.splitlines())
    for words in ("layer  kind", "step 0 · the prompt", "norms of keys and values", "reused by · 13"):
        assert words in done.out


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_real_terminal(variables: dict[str, str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment |= {"TERM": "xterm-256color", **variables}
    program, *rest = python()
    child = pexpect.spawn(
        program, [*rest, "-m", "genctl", "inspect-cache", "-m", "builtin:numbers", "7", "--steps", "2", "--heatmap"],
        env=environment, cwd=str(tmp_path), dimensions=(40, 80), timeout=90, encoding="utf-8",
    )  # fmt: skip
    text = child.read()
    child.close()
    assert child.exitstatus == 0, text
    assert "norms of keys and values" in text
    assert ("\x1b[38" in text) == (not variables)  # colours
    if variables.get("TERM") == "dumb":
        assert "\x1b" not in text

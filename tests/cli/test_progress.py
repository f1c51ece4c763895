"""The bar of a batch: progress, speed and remaining time; only on a terminal, and erased at the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from genctl.commands.run.options import RunOptions
from genctl.commands.run.screen import wants_bar
from genctl.events import Row, Stepped, Token
from genctl.io.record_output import RowTally
from genctl.terminal.live_region import RowsBar
from tests.cli.tool import _Stream, genctl
from tests.terminal.streams import Clock, Terminal, console, written

TOKEN = Token(1, -1.0, "a")


def step(*slots: int | None) -> Stepped:
    return Stepped("0", 0, tuple(Row("0", 0, (TOKEN,), -1.0, -1.0, slot) for slot in slots))


def bar(total: int | None, terminal: Console, done: int = 0) -> tuple[RowsBar, Clock]:
    clock = Clock()
    return RowsBar(terminal, total, done=done, clock=clock), clock


def test_rows_speed_and_time_left() -> None:
    terminal = Terminal()
    made, clock = bar(200, terminal.console)
    for _ in range(40):
        clock.now += 0.5
        for _ in range(10):
            made.feed(step(0, 1))
        made.row(failed=False)
    made.row(failed=True)
    clock.now += 0.5
    made.feed(step(0))
    (line,) = [line for line in terminal.visible() if line]
    assert line.endswith("41/200 rows · 1 failed · 39 tok/s · 0:01:20 left")
    assert "━" in line


def test_without_a_total_there_is_no_time_left() -> None:
    made, clock = bar(None, console(terminal=True))
    clock.now += 2
    made.feed(step(0))
    made.row()
    assert made.line() == "1 rows · 0.5 tok/s"


def test_tokens_of_a_result_count_at_once_where_its_steps_are_no_events() -> None:
    made, clock = bar(100, console(terminal=True))
    clock.now += 2
    made.add(60)
    made.row()
    assert made.line() == "1/100 rows · 30 tok/s · 0:03:18 left"


def test_a_row_counts_when_it_is_done_and_not_when_its_turn_to_be_written_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(RowsBar, "row", lambda self, *, failed=False: seen.append("failed" if failed else "done"))
    count = RowTally.written
    monkeypatch.setattr(RowTally, "written", lambda *row: (seen.append("written"), count(*row)))
    rows = [
        {"prompt": "twelve", "params": {"max_new_tokens": 9, "min_new_tokens": 9}},
        {"prompt": "nine", "params": {"max_new_tokens": 1}},
        {"prompt": "nine", "params": {"top_p": 7}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ("-i", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--batch-size", "3")
    assert genctl("run", "-m", "builtin:numbers", *words, terminal=True).status == 1
    assert sorted(seen) == ["done", "done", "failed", "written", "written", "written"]
    assert seen.index("written") > 1


def test_nothing_is_left_of_it_and_nothing_is_drawn_on_a_pipe() -> None:
    terminal, pipe = Terminal(), console()
    for to in (terminal.console, pipe):
        made, clock = bar(3, to)
        for _ in range(3):
            clock.now += 1
            made.feed(step(0))
            made.row()
        made.close()
        made.row()
    assert terminal.everything().strip() == ""
    assert written(pipe) == ""


def test_it_has_a_place_only_where_nothing_else_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal, pipe = console(terminal=True), console()

    def wanted(asked: RunOptions, err: Console = terminal, *, live: bool = False, to_terminal: bool = False) -> bool:
        monkeypatch.setattr(sys, "stdout", _Stream(terminal=to_terminal))
        return wants_bar(asked, err, live=live)

    assert wanted(RunOptions())
    assert wanted(RunOptions(output="x.jsonl"), to_terminal=True)
    assert wanted(RunOptions(format="jsonl", scores=True))
    assert not wanted(RunOptions(), to_terminal=True)
    assert not wanted(RunOptions(), pipe)
    assert not wanted(RunOptions(quiet=True))
    assert not wanted(RunOptions(), live=True)
    assert not wanted(RunOptions(scores=True))  # the tokens are printed on the same terminal

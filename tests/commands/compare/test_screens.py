"""A comparison on the screen: as text, never taller than the terminal, and no control sequence of a text is obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from genctl.commands.compare import view as shown
from genctl.commands.compare.view import Column, CompareView, picture
from genctl.comparing.metrics import Divergence
from genctl.comparing.outputs import Measured
from genctl.events import Event, Failed, Stepped, Token
from genctl.events.results import Collector
from genctl.terminal import widgets
from genctl.terminal.run_history import RunHistory
from tests import screens
from tests.cli.tool import genctl
from tests.terminal.streams import STORY, Clock, Terminal, console, lane, woven, written

SCREENS = Path(__file__).parent / "screens"
OTHER = [*STORY[:6], " fox", " who", " never", " slept", " at", " night", ",", " and", " sang", "."]
COLUMNS = (
    Column("greedy", ("greedy/0/7",)),
    Column("nucleus", ("nucleus/0/7", "nucleus/0/8")),
    Column("beam5", ("beam5/0/7",)),
    Column("broken", ("broken/0/7",)),
)


def check_screen(name: str, text: str) -> None:
    screens.check_screen(SCREENS / f"{name}.txt", text)


def events() -> list[Event]:
    return list(
        woven(
            lane("greedy/0/7", [STORY]),
            lane("nucleus/0/7", [OTHER], reasons=("eos",)),
            lane("nucleus/0/8", [OTHER[:12]], reasons=("length",), seed=8),
            lane("beam5/0/7", [STORY[:20]], reasons=("stop",)),
            iter([Failed("broken/0/7", "input", "the prompt has 9 tokens, but max_length is 8")]),
        )
    )


@pytest.mark.parametrize("width", [80, 120, 160])
def test_texts_stream_side_by_side_or_in_a_stack(width: int) -> None:
    terminal, clock = Terminal(width, 20), Clock()
    seen = []
    with CompareView(terminal.console, console(width), live=True, clock=clock) as view:
        view.begin(Text("── prompt 1 · Under the old oak"), COLUMNS)
        for number, event in enumerate(events()):
            clock.now += 0.1
            view.feed(event)
            if isinstance(event, Stepped) and number % 40 == 0:
                seen.append("\n".join(line for line in terminal.visible() if line))
        seen.append("\n".join(line for line in terminal.visible() if line))
    rule = f"\n{'=' * width}\n"
    check_screen(f"streaming_{width}", rule.join(seen) + "\n")
    assert terminal.everything().strip() == ""  # the live picture is erased before the final output


def measured(pieces: list[str], point: Divergence | None = None, reason: str = "eos") -> Measured:
    collector = Collector()
    (result,) = filter(None, map(collector.feed, lane("0", [pieces], reasons=(reason,))))
    return Measured(result, 0, result.sequences[0], {}, point)


@pytest.mark.parametrize("width", [80, 120, 160])
def test_what_stays_is_texts_with_marks_and_tables(width: int) -> None:
    out = console(width)
    token, other = Token(5, -0.9, " badger"), Token(6, -2.3, " fox")
    point = Divergence("greedy", 6, len("".join(STORY[:6])), other, token)
    at_once = Divergence("greedy", 0, 0, None, token)
    blocks = [
        shown.Block("greedy", [(measured(STORY), "")]),
        shown.Block("nucleus", [(measured(OTHER, point), "seed 7"), (measured([""], at_once, "length"), "seed 8")]),
        shown.Block("broken", [], "the prompt has 9 tokens, but max_length is 8"),
    ]
    lines = shown.blocks_lines(blocks, out, width)
    lines.append(Text(""))
    end = Divergence("greedy", 11, 0, None, Token(2, -0.01, ""))
    for sentence in (
        shown.divergence_line("nucleus", point),
        shown.divergence_line("beam5@elsewhere", end, one_model=False),
    ):
        lines += shown.wrapped(sentence, out, width)
    lines.append(Text(""))
    headings = [
        "run",
        "tokens",
        "logprob/token",
        "perplexity",
        "score",
        "entropy",
        "distinct-1",
        "distinct-2",
        "ended by",
    ]
    rows = [
        ["greedy", "38", "-0.620 [-0.711, -0.530]", "1.86", "-0.620", "0.26", "0.37", "0.60", "eos"],
        ["nucleus", "16.5", "-0.832 [-0.950, -0.790]", "2.30", "-0.832", "1.05", "0.86", "1.00", "1 eos, 1 length"],
        ["a run whose name is very long indeed", "–", "–", "∞", "+0.1", "–", "–", "–", "–"],
    ]
    lines += widgets.table_lines(headings, rows, width)
    for line in lines:
        assert cell_len(line.plain) <= width
        out.print(line)
    check_screen(f"settled_{width}", written(out))


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(10, 180),
    height=st.integers(1, 30),
    texts=st.lists(
        st.lists(st.sampled_from(["a", " bb", "\n", "漢字", " wordwordword", "\x1b[31m"]), min_size=1), max_size=6
    ),
)
def test_the_picture_always_fits(width: int, height: int, texts: list[list[str]]) -> None:
    history = RunHistory()
    columns = []
    for number, pieces in enumerate(texts):
        name = f"run{number}/0/1"
        columns.append(Column(f"run{number}", (name, "not yet")))
        for event in lane(name, [pieces, pieces[:1]]):
            history.feed(event)
            lines = picture(history, columns, console(width, height), width, height)
            assert len(lines) <= height
            assert all(cell_len(line.plain) <= width for line in lines)
            assert not any("\x1b" in line.plain or "\n" in line.plain for line in lines)


def test_it_is_redrawn_when_50_ms_have_passed_and_at_every_end() -> None:
    terminal, clock = Terminal(120, 20), Clock()
    with CompareView(terminal.console, console(), live=True, clock=clock) as view:
        view.begin(None, COLUMNS)
        drawn = []
        for event in lane("greedy/0/7", [STORY[:8]]):
            clock.now += 0.02
            before = len(written(terminal.console))
            view.feed(event)
            drawn.append(len(written(terminal.console)) > before)
    # began, prefilled, then eight steps 20 ms apart, finished
    assert drawn == [False, False, True, False, False, True, False, False, True, False, True]


def test_many_prompts_have_a_bar_on_a_terminal_and_nothing_else() -> None:
    err, out = Terminal(80, 10), console(80)
    clock = Clock()
    with CompareView(out, err.console, live=False, total=3, clock=clock) as view:
        for event in lane("greedy/0/7", [STORY[:3]]):
            clock.now += 1
            view.feed(event)
        assert "1/3 texts" in "\n".join(err.visible())
    assert written(out) == ""
    assert err.everything().strip() == ""
    silent = Terminal(80, 10)
    with CompareView(out, silent.console, live=False, quiet=True, total=3) as view:
        for event in lane("greedy/0/7", [STORY[:3]]):
            view.feed(event)
    assert written(silent.console) == ""


@pytest.mark.parametrize("columns", [80, 120])
def test_the_whole_program_on_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    runs = ("-p", "greedy", "--strategy", "short:max_new_tokens=3", "-n", "5", "--seed", "1")
    done = genctl("compare", "12\x1b[31m3", "7", "-m", "builtin:numbers", *runs, terminal=True, color="never")
    assert done.status == 0, done.err
    assert "\x1b[31m" not in done.out
    assert "prompt 2 · 7" in done.out
    assert "over 2 prompts" in done.out
    assert "forward passes instead of" in done.err
    assert "2 prefills instead of 4" in done.err


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_columns_are_shared_evenly_among_as_few_tables_as_fit(width: int) -> None:
    headings = ["run", *(f"column {number}" for number in range(11))]
    lines = [line.plain for line in widgets.table_lines(headings, [["a", *("0.125" for _ in range(11))]], width)]
    tables = "\n".join(lines).split("\n\n")
    counts = [len(table.splitlines()[1].split()) - 1 for table in tables]
    assert sum(counts) == 11
    assert max(counts) - min(counts) <= 1 or len(tables) == 1
    assert all(len(line) <= width for line in lines)

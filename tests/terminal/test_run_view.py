"""What a person sees: text as it comes, blocks in input order, nothing lost, nothing obeyed."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from genctl.commands.run.run_view import RunView
from genctl.events import Began, Ended, Event, Failed, Finished, Loading, Prefilled, Row, Stepped, Token
from tests.terminal.streams import (
    STORY,
    Clock,
    Terminal,
    check_screen,
    console,
    hypothesis,
    lane,
    token,
    woven,
    written,
)

HEADING = "── "


def view(out: Console, err: Console | None = None, clock: Clock | None = None, **more: Any) -> RunView:
    off = dict.fromkeys(("echo", "scores", "labels", "quiet"), False)
    return RunView(out, err or console(), clock=clock or Clock(), **{"live": True, "top": 0, **off, **more})


def play(events: Iterable[Event], on: RunView, clock: Clock | None = None, step_s: float = 0.1) -> None:
    with on:
        for event in events:
            if clock:
                clock.now += step_s
            on.feed(event)


def row(text: str, slot: int | None = None, parent: int = 0) -> Row:
    return Row("0", parent, (Token(1, -1.0, text),), -1.0, -1.0, slot)


BEGIN: list[Event] = [Began("0", "Prompt:", "sample", seed=7), Prefilled("0", 2)]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_lone_text_is_on_the_stream_as_soon_as_its_token_is(terminal: bool) -> None:
    out = console(terminal=terminal)
    on = view(out)
    seen = []
    for event in lane("0", [STORY[:4]]):
        on.feed(event)
        seen.append(written(out))
    assert seen == ["", "", " there", " there lived", " there lived an", " there lived an old", " there lived an old\n"]
    on.close()
    assert written(out) == " there lived an old\n"


def test_the_summary_says_how_it_went() -> None:
    err = console(width=200)
    play(lane("0", [STORY[:24]]), view(console(), err))
    assert written(err) == "24 tokens · 192 tok/s · first token after 0.04 s · ended by itself · seed 7\n"


def test_without_timings_in_the_events_the_clock_is_asked() -> None:
    err, clock = console(), Clock()
    on = view(console(), err, clock)
    for passes, event in [
        (0.0, BEGIN[0]),
        (0.5, BEGIN[1]),
        (0.25, Stepped("0", 0, (row("a"),))),
        (1.75, Finished("0", (hypothesis([token(0, "a"), token(1, "b")], reason="length"),))),
    ]:
        clock.now += passes
        on.feed(event)
    on.close()
    assert written(err) == "2 tokens · 1.0 tok/s · first token after 0.75 s · cut at max_new_tokens · seed 7\n"


def test_quiet_leaves_the_result_and_the_failures() -> None:
    out, err = console(), console()
    play([*lane("0", [STORY[:2]]), Failed("1", "input", "empty prompt")], view(out, err, quiet=True))
    assert written(out) == " there lived\n"
    assert written(err) == "error: prompt 1: empty prompt\n"


def test_accepted_drafts_and_stop_strings_are_in_the_summary() -> None:
    err = console(width=200)
    done = hypothesis([token(0, "a"), token(1, "b")], reason="stop", stop="\nEND\x1b")
    events = [*BEGIN, Stepped("0", 0, (row("ab"),), (), 8, 6), Finished("0", (done,), 2, 1.0, 0.5, 3)]
    play(events, view(console(), err, verbose=True))
    assert written(err) == (
        "2 tokens · 2.0 tok/s · first token after 0.50 s · stopped by “END␛” · 6 of 8 drafts accepted (75%) · seed 7"
        " · 2 prompt tokens · 3 forward passes\n"
    )


def test_the_prompt_comes_before_its_continuation_and_is_dim_in_colour() -> None:
    plain, coloured = console(), console(colour=True)
    play(lane("0", [STORY[:2]]), view(plain, echo=True))
    play(lane("0", [STORY[:2]]), view(coloured, echo=True))
    assert written(plain) == "Under the old oak there lived\n"
    assert written(coloured) == "\x1b[2mUnder the old oak\x1b[0m there lived\n"


def test_a_pipe_gets_the_bytes_as_they_are_and_no_escape_of_ours() -> None:
    out, err = console(), console()
    texts = [["a\x1b[31m", "b\r", "\u202e[bold]"], ["c"]]
    play(lane("0", texts, prompt="p\x07"), view(out, err, echo=True, scores=True, top=3, explain=True))
    assert written(out).startswith("p\x07a\x1b[31mb\r\u202e[bold]\n")
    ours = written(out).replace("p\x07a\x1b[31mb\r", "") + written(err)
    assert "\x1b" not in ours


def test_a_terminal_is_never_given_a_control_character_of_the_model() -> None:
    hostile = ["\x1b[2J", "\x1b]0;gone\x07", "\x9b1A", "\r", "\u202e", "[red]", "x\n"]
    for texts in ([hostile], [hostile, hostile]):
        terminal, clock = Terminal(), Clock()
        play(
            lane("\x1b0", texts, prompt="\x1b[5m\x07"),
            view(terminal.console, clock=clock, echo=True, labels=True),
            clock,
        )
        shown = terminal.everything()
        assert shown.count("␛[5m␇␛[2J␛]0;gone␇⟨U+009B⟩1A␍⟨U+202E⟩[red]x") == len(texts)
        assert not {"\x07", "\x9b", "\u202e"} & set(written(terminal.console))


@pytest.mark.parametrize("height", [2, 5, 11, 40])
def test_nothing_is_lost_however_small_the_terminal(height: int) -> None:
    terminal, clock = Terminal(80, height), Clock()
    lanes = 7
    texts = [[f" word{lane_number}x{step}\n" for step in range(30)] for lane_number in range(lanes)]
    streams = [lane(str(number), [text], prompt=f"text {number}") for number, text in enumerate(texts)]
    play(woven(*streams), view(terminal.console, clock=clock, labels=True), clock)
    lines = terminal.everything().split("\n")
    expected = []
    for number, text in enumerate(texts):
        heading = f"── prompt {number + 1} · text {number} · ended by itself "
        expected += [heading + "─" * (80 - len(heading)), *"".join(text).rstrip("\n").split("\n"), ""]
    assert lines == [line.rstrip() for line in expected]


def test_while_it_runs_the_newest_lines_are_in_view_and_the_screen_is_never_exceeded() -> None:
    height, clock = 10, Clock()
    terminal = Terminal(80, height)
    on = view(terminal.console, clock=clock)
    long = [f"line {step}\n" for step in range(60)]
    for place, event in enumerate(lane("0", [long, long])):
        clock.now += 0.1
        on.feed(event)
        if place == 40:
            seen = terminal.visible()
    on.close()
    assert sum(line == "line 38" for line in seen) == 2
    assert sum(line == "⋮" for line in seen) == 2
    assert sum(line.startswith(HEADING) for line in seen) == 2
    assert terminal.everything() == ("".join(long) * 2)


def test_more_texts_than_lines_are_counted() -> None:
    clock = Clock()
    terminal = Terminal(80, 8)
    on = view(terminal.console, clock=clock)
    for event in (*BEGIN, Stepped("0", 0, tuple(row(f"text {slot}", slot) for slot in range(9)))):
        clock.now += 0.1
        on.feed(event)
    assert [line for line in terminal.visible() if line and HEADING not in line] == [
        "text 0",
        "text 1",
        "text 2",
        "… and 6 more",
    ]


def test_repainting_waits_for_its_frame() -> None:
    clock = Clock()
    terminal = Terminal()
    on = view(terminal.console, clock=clock)
    paints = []
    for place, event in enumerate(lane("0", [STORY, STORY])):
        clock.now += 0.01
        before = written(terminal.console)
        on.feed(event)
        if place >= 2 and written(terminal.console) != before:
            paints.append(clock.now)
    gaps = [later - earlier for earlier, later in pairwise(paints)]
    assert len(paints) > 5
    assert min(gaps[:-1]) >= 0.05 - 1e-9


def test_competing_rows_show_the_best_and_settle_on_the_winner() -> None:
    clock = Clock()
    terminal = Terminal()
    on = view(terminal.console, clock=clock)
    events: list[Event] = [
        *BEGIN,
        Stepped("0", 0, (row("good"), row("bad"))),
        Stepped("0", 1, (row(" start", None, 1), row(" idea"))),
    ]
    for event in events:
        clock.now += 0.1
        on.feed(event)
    assert "bad start" in terminal.visible()
    won = hypothesis([token(0, "good"), token(1, " idea")])
    on.feed(Stepped("0", 2, (), (Ended("0", 1, (), won),)))
    on.feed(Finished("0", (won,)))
    on.close()
    assert terminal.everything() == "good idea\n"


FORKED = [*BEGIN, Stepped("0", 0, (row("The"),)), Stepped("0", 1, (row(" cat"), row(" dog")))]
OPEN = [*BEGIN, Stepped("0", 0, (row("smile"),)), Stepped("0", 1, (row(""),))]


@pytest.mark.parametrize(
    ("events", "tokens", "shown"),
    [
        (FORKED, ["The", " dog", "."], "The dog.\n"),  # a row that turned into a search
        (OPEN, ["smile", "�"], "smile�\n"),  # a character that stayed open
        (BEGIN, ["a"], "a\nthe steps of this text were not recorded\n"),
    ],
)
def test_a_text_ends_as_its_result_has_it(events: list[Event], tokens: list[str], shown: str) -> None:
    out = console()
    done = hypothesis([token(place, text) for place, text in enumerate(tokens)])
    play([*events, Finished("0", (done,))], view(out, scores=events is BEGIN))
    assert written(out) == shown


@pytest.mark.parametrize("live", [True, False])
def test_an_empty_text_is_a_line_too(live: bool) -> None:
    out = console()
    empty = hypothesis([token(0, "")])
    play(
        [*BEGIN, Stepped("0", 0, (), (Ended("0", 0, (token(0, ""),), empty),)), Finished("0", (empty,))],
        view(out, live=live),
    )
    assert written(out) == "\n"


def test_not_live_shows_nothing_until_a_text_is_whole() -> None:
    out = console(terminal=True)
    on = view(out, live=False)
    for event in lane("0", [STORY[:3]]):
        assert written(out) == ""
        on.feed(event)
    assert written(out) == " there lived an\n"


def test_where_nothing_may_move_the_first_prompt_streams_and_the_others_follow() -> None:
    out = console()
    on = view(out, labels=True)
    events = list(woven(lane("0", [STORY[:9]], prompt="one"), lane("1", [STORY[:3]], prompt="two")))
    for event in events[:8]:
        on.feed(event)
    assert written(out).endswith("─\n there lived")
    for event in events[8:]:
        on.feed(event)
    on.close()
    text = written(out)
    assert "\x1b" not in text
    assert [line[:12] for line in text.split("\n")] == [
        "── prompt 1 ",
        " there lived",
        "",
        "── prompt 2 ",
        " there lived",
        "",
    ]


def test_failures_are_told_in_their_turn() -> None:
    stream = io.StringIO()
    out = Console(file=stream, width=80, soft_wrap=True, _environ={})
    err = Console(file=stream, width=80, soft_wrap=True, _environ={})
    events = woven(lane("0", [STORY[:5]]), iter([Failed("1", "input", "the prompt is empty")]), lane("2", [STORY[:2]]))
    play(events, view(out, err))
    assert stream.getvalue().split("\n")[:3] == [
        " there lived an old badger",
        "error: prompt 1: the prompt is empty",
        " there lived",
    ]
    assert "3 prompts · 7 tokens" in stream.getvalue()
    assert "2 ended by themselves · 1 failed · seed 7 (first prompt)" in stream.getvalue()


def test_only_failures_make_no_summary() -> None:
    out, err = console(), console()
    play([Failed("0", "model", "no language-model head")], view(out, err))
    assert written(out) == ""
    assert written(err) == "error: prompt 0: no language-model head\n"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("sequences", [1, 2])
def test_what_was_written_before_an_interruption_stays(terminal: bool, sequences: int) -> None:
    screen, err, clock = Terminal(), console(), Clock()
    out = screen.console if terminal else console()

    def interrupted() -> Iterator[Event]:
        yield from list(lane("0", [STORY] * sequences))[:6]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(interrupted(), view(out, err, clock), clock)
    assert (screen.everything() if terminal else written(out)) == " there lived an old\n" * sequences
    assert f"{4 * sequences} tokens" in written(err)
    assert "not finished" in written(err)


def test_a_closed_pipe_is_left_alone() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    err = console()
    with pytest.raises(BrokenPipeError):
        play(lane("0", [STORY]), view(Console(file=Closed(), _environ={}), err))
    assert written(err) == ""


def test_scores_are_grouped_by_sequence() -> None:
    out = console()
    play(lane("0", [STORY[:3], STORY[:2]]), view(out, labels=True, scores=True, top=2))
    check_screen("scores_by_sequence_80", written(out))


def test_the_summary_has_the_seed_of_the_run_and_the_passes_that_prompts_share() -> None:
    err = console(width=200)
    shown = view(console(), err, labels=True, verbose=True)
    shown.seed, shown.passes = 5, lambda: 4
    play(woven(*(lane(str(number), [STORY[:2]]) for number in range(9))), shown)
    assert written(err).endswith("seed 5 · 45 prompt tokens · 4 forward passes\n")


def test_loading_is_a_bar_that_goes_away_on_a_terminal_only() -> None:
    terminal, clock = Terminal(), Clock()
    on = view(console(), terminal.console, clock)
    for done in (0, 60, 124):
        clock.now += 0.1
        on.feed(Loading("gpt2", done, 149, "tensors"))
    assert terminal.visible()[0] == "reading gpt2 ━━━━━━━━━━━━━━━━━━━╸     124/149 tensors"
    on.feed(Loading("gpt2", 5_000_000, 10_000_000))
    assert "downloading gpt2 " in terminal.visible()[1]
    assert terminal.visible()[1].endswith("4.8/9.5 MiB")
    on.feed(BEGIN[0])
    assert terminal.everything() == "\n"

    for quiet, err in ((False, console()), (True, console(terminal=True))):
        on = view(console(), err, quiet=quiet)
        on.feed(Loading("gpt2", 1, 2, "tensors"))
        on.close()
        assert written(err) == ""

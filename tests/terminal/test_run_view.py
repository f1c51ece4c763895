"""What a person sees: text as it comes, blocks in input order, nothing lost, nothing obeyed."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from genctl.commands.run.run_view import RunView
from genctl.events import Began, CacheRead, Ended, Event, Failed, Finished, Loading, Prefilled, Row, Stepped, Token
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


def view(out: Console, err: Console | None = None, clock: Clock | None = None, **asked: Any) -> RunView:
    flags: dict[str, Any] = {
        "live": True,
        "echo": False,
        "scores": False,
        "top": 0,
        "labels": False,
        "quiet": False,
        **asked,
    }
    return RunView(out, err or console(), clock=clock or Clock(), **flags)


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


def several(**more: Any) -> Iterable[Event]:
    return woven(
        lane("0", [STORY[:30], STORY[:18]], prompt="Under the old oak", seed=7, **more),
        lane(
            "1", [STORY, STORY[:6]], prompt="In a town by the sea, where the gulls are louder than the bells,", **more
        ),
        lane("2", [STORY[:9]], prompt="Once", seed=9, **more),
    )


@pytest.mark.parametrize("width", [80, 120])
def test_several_prompts_settle_in_input_order(width: int) -> None:
    terminal, err, clock = Terminal(width, 12), console(width), Clock()
    on = view(terminal.console, err, clock, labels=True, echo=True)
    middle = ""
    with on:
        for place, event in enumerate(several()):
            clock.now += 0.1
            on.feed(event)
            if place == 50:
                middle = "\n".join(terminal.visible())
    check_screen(f"several_{width}", f"{middle}\n{'=' * width}\n{terminal.everything()}{'=' * width}\n{written(err)}")


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


def test_a_single_row_that_turns_into_a_search_is_not_taken_at_its_word() -> None:
    out = console()
    forced = [*BEGIN, Stepped("0", 0, (row("The"),)), Stepped("0", 1, (row(" cat"), row(" dog")))]
    won = hypothesis([token(0, "The"), token(1, " dog"), token(2, ".")])
    play([*forced, Finished("0", (won,))], view(out))
    assert written(out) == "The dog.\n"


def test_a_winner_that_contradicts_what_was_shown_is_written_in_full() -> None:
    out = console()
    play([*BEGIN, Stepped("0", 0, (row("A cat"),)), Finished("0", (hypothesis([token(0, "The dog")]),))], view(out))
    assert written(out) == "A cat\nThe dog\n"


def test_characters_left_open_at_the_end_are_still_written() -> None:
    out = console()
    open_end = hypothesis([token(0, "smile"), token(1, "�")], reason="length")
    play([*BEGIN, Stepped("0", 0, (row("smile"),)), Stepped("0", 1, (row(""),)), Finished("0", (open_end,))], view(out))
    assert written(out) == "smile�\n"


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


def test_a_prompt_that_begins_later_does_not_break_the_line_that_streams() -> None:
    terminal, clock = Terminal(), Clock()
    first, second = list(lane("0", [STORY[:6]], prompt="one")), list(lane("1", [STORY[:3]], prompt="two"))
    play([*first[:4], *second, *first[4:]], view(terminal.console, clock=clock), clock)
    assert terminal.everything() == " there lived an old badger in\n there lived an\n"


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


@pytest.mark.parametrize("width", [80, 120])
def test_scores_stand_under_their_text(width: int) -> None:
    terminal, err, clock = Terminal(width, 16), console(width), Clock()
    on = view(terminal.console, err, clock, scores=True, top=3, echo=True)
    middle = ""
    with on:
        for place, event in enumerate(lane("0", [STORY[:14]])):
            clock.now += 0.1
            on.feed(event)
            if place == 12:
                middle = "\n".join(terminal.visible())
    check_screen(
        f"run_scores_{width}", f"{middle}\n{'=' * width}\n{terminal.everything()}{'=' * width}\n{written(err)}"
    )


def test_scores_are_grouped_by_sequence() -> None:
    out = console()
    play(lane("0", [STORY[:3], STORY[:2]]), view(out, labels=True, scores=True, top=2))
    check_screen("scores_by_sequence_80", written(out))


def test_explain_shows_each_step_and_sums_up() -> None:
    out, err = console(), console()
    play(lane("0", [STORY[:3]], trace=True), view(out, err, explain=True, quiet=True))
    check_screen("run_explain_80", f"{written(out)}{'=' * 80}\n{written(err)}")


def test_a_text_whose_steps_are_unknown_says_so() -> None:
    out = console()
    play([*BEGIN, Finished("0", (hypothesis([token(0, "a")]),))], view(out, scores=True))
    assert written(out) == "a\nthe steps of this text were not recorded\n"


def test_drafts_are_a_detail() -> None:
    err = console(width=200)
    play([*BEGIN, Stepped("0", 0, (row("ab"),), (), 8, 6)], view(console(), err))
    assert "drafts" not in written(err)


def test_the_summary_has_the_seed_of_the_run_and_the_passes_that_prompts_share() -> None:
    err = console(width=200)
    shown = view(console(), err, labels=True, verbose=True)
    shown.seed, shown.passes = 5, lambda: 4
    play(woven(*(lane(str(number), [STORY[:2]]) for number in range(9))), shown)
    lines = written(err).splitlines()
    assert [line.split(" ")[0] for line in lines] == [*["prompt"] * 5, "9"]  # not a line for each of many prompts
    assert lines[-1].endswith("seed 5 · 45 prompt tokens · 4 forward passes")


def test_verbose_says_what_each_prompt_cost() -> None:
    err = console(width=200)
    play(woven(lane("0", [STORY[:3]]), lane("1", [STORY[:2]])), view(console(), err, labels=True, verbose=True))
    lines = written(err).split("\n")
    assert lines[0] == (
        "prompt 1 · builtin:stories · sample · seed 7 · 5 prompt tokens read in 0.02 s"
        " · 3 tokens in 0.12 s · 3 forward passes"
    )
    assert lines[2].endswith("seed 7 (first prompt) · 10 prompt tokens")  # several share passes


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


def test_a_cache_reading_changes_nothing_on_the_screen() -> None:
    out = console()
    play([*BEGIN, CacheRead("0", 0, ()), *list(lane("0", [STORY[:1]]))[2:]], view(out))
    assert written(out) == " there\n"

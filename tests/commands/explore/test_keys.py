"""Keys that come at once, the line that is typed in, and what help says."""

from __future__ import annotations

import pytest

from genctl.commands.explore.panes import parts, text_of
from genctl.commands.explore.screen_keys import COLUMNS, MOUSE
from genctl.tree.language import COMMANDS
from tests.commands.explore.app import Shown, play
from tests.tree.trees import explorer


def test_tab_completes_the_line_and_no_key_leaves_it_for_the_tree() -> None:
    async def part(shown: Shown) -> None:
        app = shown.app
        await shown.burst(":gen\t")
        assert app.prompt.value == "generate"
        await shown.press("shift+tab", "tab", "home", "x", "end", "left", "right")
        assert app.focused is app.prompt
        assert app.prompt.value == "xgenerate"
        assert len(shown.tree) == 0
        await shown.press("escape", "colon")
        await shown.burst("set top_\t")
        assert app.prompt.value.startswith("set top_")
        assert app.prompt.value.endswith("=")
        await shown.press("escape")
        assert app.focused is app.choices
        assert not app.prompt.display

    play(part)


def test_keys_of_a_burst_go_where_they_would_go_one_by_one() -> None:
    async def part(shown: Shown) -> None:
        app = shown.app
        await shown.press("space")
        await shown.burst(":goto 2\r:bookmark here\r:goto 4\rm")
        assert dict(shown.tree.bookmarks) == {"here": 2, "m1": 4}
        await shown.burst("uuu")
        assert len(shown.tree) == 0  # two bookmarks and the generation
        assert not app.failed, app.answer
        await shown.burst("/girl\r")
        await app.workers.wait_for_complete()
        await shown.settled()
        assert all("girl" in app.choices.first.of(app.choices._id_at(row)).text for row in range(len(app.choices)))
        await shown.burst("\x1bs")
        await shown.burst("max_new_tokens=3\rs")
        await shown.burst("min_new_tokens=2\r")
        assert shown.tree.knobs == {"max_new_tokens": 3, "min_new_tokens": 2}
        await shown.burst("eA hen\x13")
        assert "".join(shown.tree.nodes[node].text for node in shown.tree.branch()).strip() == "A hen"

    play(part)


def test_a_click_into_a_pane_leaves_the_line_and_a_filter_stays() -> None:
    async def part(shown: Shown) -> None:
        app = shown.app
        await shown.press("space")
        await shown.burst(":gen")
        await shown.pilot.click("#text", offset=(3, 1))
        await shown.settled()
        assert not app.prompt.display
        before = len(shown.tree)
        await shown.burst("/girl")
        await app.workers.wait_for_complete()
        await shown.pilot.click("#alternatives", offset=(5, 0))
        await shown.settled()
        assert not app.prompt.display
        assert 0 < len(app.choices) < len(app.choices.first)  # type: ignore[arg-type]
        await shown.press("enter")
        assert "girl" in shown.tree.nodes[before + 1].text

    play(part)


@pytest.mark.parametrize("word", ["help", "?"])
def test_help_of_the_line_has_keys_mouse_columns_and_commands(word: str) -> None:
    async def part(shown: Shown) -> None:
        await shown.press("colon")
        await shown.answer(word)
        for first, _ in (*MOUSE, *COLUMNS):
            assert first in shown.text
        for command in COMMANDS.values():
            assert command.usage in shown.text

    play(part, size=(120, 110))


def test_quit_leaves() -> None:
    async def part(shown: Shown) -> None:
        await shown.press("colon")
        await shown.answer("quit")

    assert play(part).return_value == 0


def test_a_setting_that_turns_sampling_on_says_so_with_the_settings_that_act() -> None:
    async def part(shown: Shown) -> None:
        await shown.burst("stop_p=0.5\r")
        assert "sampling is on: temperature = 1.0, top_k = 50, top_p = 0.5" in shown.text
        await shown.burst("stop-p 0.6\r")
        assert shown.tree.knobs == {"top_p": 0.6}
        assert "sampling is on" not in shown.text
        await shown.burst("sreset\r")
        assert "sampling is off" in shown.text

    play(part, explorer(max_new_tokens=3))


def test_the_speed_is_that_of_the_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    made = explorer(max_new_tokens=5, do_sample=False)
    times = iter(range(0, 1000, 2))
    monkeypatch.setattr(made.space.session, "clock", lambda: float(next(times)))

    async def part(shown: Shown) -> None:
        assert "tokens/s" not in shown.text
        await shown.press("space")
        spent = shown.app.source.speed
        assert spent is not None
        assert spent <= 0.5  # a token in two seconds at most, however fast the screen takes them in
        assert f"{spent:.1f} tokens/s" in shown.text

    play(part, made)


@pytest.mark.parametrize("size", [(60, 30), (80, 24), (140, 40)], ids=lambda size: str(size[0]))
def test_alternatives_have_room_and_their_log_probability(size: tuple[int, int]) -> None:
    async def part(shown: Shown) -> None:
        await shown.press("space", "home")
        app = shown.app
        assert app.choices.size.height >= (9 if size[0] == 60 else 18)
        heading = next(line for line in shown.lines if "logprob" in line and "rank" in line)
        for row in range(3):
            token = app.choices.first.of(int(app.choices.first.order[row]))  # type: ignore[union-attr]
            assert any(f" {token.logprob:.3f} " in line or f" {token.logprob:.2f} " in line for line in shown.lines)
        line = next(line for line in shown.lines if line.count("%") == 2)
        assert heading.index("prob") + 4 == line.index("%") + 1  # the heads stand above their columns
        assert heading.index("final") + 5 == line.rindex("%") + 1

    play(part, size=size)


def test_a_row_is_drawn_while_an_undo_takes_its_tokens_away() -> None:
    made = explorer(max_new_tokens=6, do_sample=False)
    list(made.do("generate 6"))
    (part,) = parts(made.tree)
    whole = text_of(made.tree, part, 100)
    list(made.do("start"))
    list(made.do("undo"))
    assert whole.startswith(text_of(made.tree, part, 100))

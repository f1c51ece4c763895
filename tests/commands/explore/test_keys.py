"""Keys that come at once, the line that is typed in, and what help says."""

from __future__ import annotations

import pytest

from genctl.commands.explore.keys import COLUMNS, KEYS
from genctl.tree.commands import COMMANDS
from tests.commands.explore.app import Shown, play
from tests.tree.trees import explorer


def test_a_key_completes_the_line_and_no_key_leaves_it_for_the_tree() -> None:
    async def part(shown: Shown) -> None:
        app = shown.app
        await shown.burst(":gen")
        await shown.press("right")
        assert app.line.value == "generate"
        await shown.press("home", "x", "end", "left", "right")
        assert app.focused is app.line
        assert app.line.value == "xgenerate"
        assert len(shown.tree) == 0
        await shown.press("escape")
        assert app.focused is app.choices
        assert not app.line.display

    play(part)


def test_a_click_into_a_pane_leaves_the_line() -> None:
    async def part(shown: Shown) -> None:
        await shown.burst(":gen")
        await shown.pilot.click("#alternatives", offset=(5, 3))
        await shown.settled()
        assert not shown.app.line.display
        assert len(shown.tree) == 0

    play(part)


@pytest.mark.parametrize("keys", ["?", ":help\r", ":?\r"])
def test_help_has_keys_columns_and_commands(keys: str) -> None:
    async def part(shown: Shown) -> None:
        await shown.burst(keys)
        for first in (*(key.shown for key in KEYS), *(name for name, _ in COLUMNS)):
            assert first in shown.text
        for command in COMMANDS.values():
            assert command.usage in shown.text

    play(part, size=(120, 110))


@pytest.mark.parametrize("in_line", [False, True])
def test_quit_leaves(in_line: bool) -> None:
    async def part(shown: Shown) -> None:
        if in_line:
            await shown.press("colon")
            await shown.answer("quit")
        else:
            await shown.press("q")

    assert play(part).return_value == 0


def test_a_setting_that_turns_sampling_on_says_so_with_the_settings_that_act() -> None:
    async def part(shown: Shown) -> None:
        await shown.burst("stop_p=0.5\r")
        assert "sampling is on: temperature = 1.0, top_k = 50, top_p = 0.5" in shown.text
        await shown.burst("stop-p 0.6\r")
        assert shown.tree.settings == {"top_p": 0.6}
        assert "sampling is on" not in shown.text
        await shown.burst("pgreedy\r")
        assert "sampling is off" in shown.text

    play(part, explorer(max_new_tokens=3))

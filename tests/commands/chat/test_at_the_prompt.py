"""What a person types at the prompt of `genctl chat`: long texts, settings, files, and what is said of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from genctl.commands.chat.chat import setting
from genctl.errors import UsageError
from tests.commands.chat.talk import Talk

QUIET = ("-q", "-n", "8")


def unwrapped(talk: Talk) -> str:
    """The screen as a terminal copies it: rows that are full go on in the next one."""
    return "".join(row.rstrip() if row.endswith(" ") else row for row in talk.screen.display)


@pytest.mark.parametrize("width", [30, 60, 80, 140])
def test_a_path_is_never_broken(width: int, own_state: Path) -> None:
    state = own_state.parent / "a folder of state"
    with Talk(state, *QUIET, width=width) as talk:
        talk.say("A fox")
        (path,) = (state / "genctl" / "sessions").glob("*.jsonl")
        talk.say("/save")
        assert f"'{path}'" in unwrapped(talk)
        talk.press("\x04")
        assert talk.end() == 0
        assert f"genctl chat --open '{path}'" in unwrapped(talk)
        written = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", talk.raw.decode())
        assert f"genctl chat --open '{path}'" in written  # the terminal breaks it, and copies it as one


def test_a_turn_that_does_not_fit_the_context_is_not_sent(own_state: Path) -> None:
    with Talk(own_state, "-q", "-n", "40", height=200, width=200) as talk:
        talk.say("A " + "bear " * 400)
        said = talk.say("A " + "hen " * 220)
        assert re.search(r"error: not sent: the prompt has \d+ tokens, but the model's context is 512", said[-2])
        assert said[-1].startswith("hint: /undo and /edit shorten the chat, /new begins another")
        assert talk.say("/branch")[0].startswith("* 1  1 turn")
        talk.say("/set truncate=left")
        assert "cut at max_new_tokens" in talk.say("A " + "hen " * 220)


def test_settings_are_written_as_people_write_them(own_state: Path) -> None:
    with Talk(own_state, *QUIET) as talk:
        assert talk.say("/set top_p 0.5") == ["/set top_p turns sampling on", "set top_p=0.5"]
        assert talk.say("/set top_k = 3") == ["set top_k=3"]  # sampling is on already
        assert talk.say("/set top-p") == ["top_p = 0.5 (/set top_p); /set top_p=VALUE sets it"]
        assert talk.say("/set top_q 1")[0].startswith("error: /set top_q: unknown key top_q; did you mean top_")
        talk.say("/preset creative")
        assert "about" not in " ".join(talk.say("/set"))
        talk.say("A fox")
    (path,) = (own_state / "genctl" / "sessions").glob("*.jsonl")
    assert '"about"' not in path.read_text()


@pytest.mark.parametrize(
    ("typed", "read"),
    [("top_p 0.5", "top_p=0.5"), ("top-p  =  0.5", "top_p=0.5"), ("prefix a = b", "prefix=a = b"), ("seed", "seed=")],
)
def test_a_setting_with_and_without_a_sign(typed: str, read: str) -> None:
    assert setting(typed) == read
    with pytest.raises(UsageError, match="belongs to the whole chat"):
        setting("dtype float16")


def test_edit_says_how_it_ends(own_state: Path) -> None:
    with Talk(own_state, *QUIET) as talk:
        talk.say("A fox")
        talk.press("/edit\r")
        talk.wait(lambda: "change turn 1: Enter answers it again, Ctrl-C leaves it as it is" in talk.lines)
        talk.press("\x03")
        talk.wait(lambda: "nothing was changed" in talk.lines)
        talk.at_prompt()
        assert any("/edit [N [TEXT]]" in line for line in talk.say("/help"))
        talk.say("/edit 1 A hen")
        assert len(talk.say("/branch")) == 2

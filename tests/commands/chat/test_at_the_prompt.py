"""What a person types at the prompt of `genctl chat`: long texts, settings, files, and what is said of them."""

from __future__ import annotations

import re
from pathlib import Path

import pexpect
import pytest

from genctl.commands.chat.chat import setting
from genctl.errors import UsageError
from genctl.terminal.text_width import unbroken
from tests.commands.chat.talk import ROOT, Talk
from tests.warm import python

QUIET = ("-q", "-n", "8")
PASTE = "\x1b[200~{}\x1b[201~"


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


def test_lines_break_between_words_and_not_in_what_is_whole() -> None:
    assert unbroken("saved in /a/b c and more", 10, ["/a/b c"]) == ["saved in", "/a/b c and", "more"]
    assert unbroken("saved in /a/very/long/path now", 10) == ["saved in", "/a/very/long/path", "now"]
    assert unbroken("one\ntwo three", 8) == ["one", "two", "three"]


def test_a_long_paste_that_ends_with_a_newline_stays_in_view(own_state: Path) -> None:
    with Talk(own_state, *QUIET, height=24) as talk:
        talk.press(PASTE.format("word " * 450 + "end\r"))
        talk.wait(lambda: talk.lines[-1].endswith("end"))
        assert sum("word word" in line for line in talk.lines) > 20
        talk.press("\r")
        talk.at_prompt()
        shown = [line for line in talk.screen.display if line.strip()]
        assert len(shown) > 20
        assert "cut at max_new_tokens" in " ".join(shown[-3:])
    with Talk(own_state, *QUIET, height=24) as talk:
        talk.press(PASTE.format("word " * 900 + "\rthe end\r"))
        talk.wait(lambda: any(line.endswith("the end") for line in talk.lines))
        talk.press("\r")
        talk.at_prompt()
        assert sum("word word" in line for line in talk.lines) > 10  # all that was said is above, however long
        assert "error: not sent: the prompt has" in " ".join(talk.lines[-4:])


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


def test_an_answer_that_is_eos_alone_is_told_from_none(own_state: Path) -> None:
    with Talk(own_state, "-q", "-n", "1", "--set", "forced_eos_token_id=2") as talk:
        assert talk.say("A fox") == ["the answer is empty: the model ends it at once (EOS)"]


def test_a_person_whose_answers_go_through_tee_sees_the_prompt(own_state: Path) -> None:
    program, *rest = python()
    command = " ".join([program, *rest, "-m", "genctl", "chat", *QUIET])
    with Talk(own_state) as talk:
        talk.child.close(force=True)
        environment = {
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(own_state),
            "TERM": "xterm",
            "PATH": "/usr/bin:/bin",
        }
        talk.child = pexpect.spawn("/bin/sh", ["-c", f"{command} | tee t"], env=environment, cwd=str(own_state.parent))
        talk.wait(lambda: talk.lines[-1:] == [">"])
        talk.press("A fox\r")
        talk.wait(lambda: talk.lines[-1:] == [">"] and len(talk.lines) > 2)
        talk.press("\x04")
        assert talk.end() == 0
    assert "> A fox" in talk.lines
    assert (own_state.parent / "t").read_text().startswith(" named")
    assert b">" not in (own_state.parent / "t").read_bytes()

"""`genctl chat` on a terminal: what is typed, what stays on the screen, how it ends."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from genctl.commands.chat.chat import setting
from genctl.commands.chat.log import ChatLog
from genctl.errors import UsageError
from tests.cli.tool import genctl
from tests.commands.chat.talk import Talk
from tests.tiny import checkpoint

QUIET = ("-q", "-n", "12")


def saved(state: Path) -> Path:
    (path,) = (state / "genctl" / "sessions").glob("*.jsonl")
    return path


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_chat_stays_on_the_screen_and_is_saved(width: int, own_state: Path) -> None:
    with Talk(own_state, "-n", "20", width=width) as talk:
        said = talk.say("Once upon a time there was a fox")
        assert said[0].startswith(" named Rowan")
        assert all(len(line) <= width for line in talk.lines)
        shown = "".join(said).replace(" ", "")  # a narrow terminal breaks the line anywhere
        assert re.search(r"20tokens·[\d,]+tok/s·read9of9tokens·?cutatmax_new_tokens", shown)
        more = talk.say("He met a bear")
        assert "20 tokens · " in " ".join(more)
        talk.press("\x04")
        assert talk.end() == 0
        assert "saved; genctl chat --open" in " ".join(talk.lines)
        assert "Once upon a time there was a fox" in talk.lines[1]  # nothing was erased
        assert b"\x1b[?1049h" not in talk.raw  # no alternate screen
    assert '"content": "He met a bear"' in saved(own_state).read_text()


def test_ctrl_c_ends_the_answer_and_keeps_it(own_state: Path) -> None:
    many = 90_000  # more than any machine writes before it is interrupted
    model = checkpoint("llama", own_state.parent / "long", max_position_embeddings=100_000)
    with Talk(own_state, "-m", str(model), "-n", str(many), "--min-new-tokens", str(many)) as talk:
        before = len(talk.lines)
        talk.child.send("Once upon a time\r")
        talk.wait(lambda: len(talk.lines) > before + 3)
        talk.press("\x03")
        talk.at_prompt()
        assert "interrupted" in " ".join(talk.lines[-3:])
        tokens = int(re.findall(r"([\d,]+) tokens · [\d,]+ tok/s", " ".join(talk.lines))[-1].replace(",", ""))
        assert 0 < tokens < many
        talk.press("\x03")
        talk.wait(lambda: "Ctrl-C again leaves, and so does Ctrl-D" in talk.lines)
        talk.at_prompt().press("\x03")
        assert talk.end() == 130
        assert "saved; genctl chat --open" in " ".join(talk.lines)
    answer = ChatLog.look(saved(own_state)).here[-1]
    assert (len(answer.token_ids), answer.finish_reason) == (tokens, "interrupted")


def test_ctrl_c_clears_the_line_and_twice_on_an_empty_one_leaves(own_state: Path) -> None:
    note = "Ctrl-C again leaves, and so does Ctrl-D"
    with Talk(own_state, *QUIET) as talk:
        talk.press("\x03")
        talk.wait(lambda: talk.lines.count(note) == 1)
        for half in ("half a sent", "another"):  # regression: the second Ctrl-C left, although text had been typed
            talk.at_prompt().press(half)
            talk.wait(lambda half=half: talk.lines[-1] == f"> {half}")
            talk.press("\x03")
            talk.wait(lambda half=half: talk.lines[-2:] == [f"> {half}", ">"])
        talk.at_prompt().press("\x03")
        talk.wait(lambda: talk.lines.count(note) == 2)
        talk.at_prompt()
        talk.say("/help")  # a command in between
        talk.press("\x03")
        talk.wait(lambda: talk.lines.count(note) == 3)
        talk.press("\x03")
        assert talk.end() == 130
    assert not (own_state / "genctl" / "sessions").exists()  # no message was sent


def test_a_new_conversation_has_its_own_file_and_the_settings_of_the_one_before(own_state: Path) -> None:
    with Talk(own_state, *QUIET, "--seed", "5", "--do-sample", width=300) as talk:
        assert talk.say("/new") == ["error: the chat is empty"]
        talk.say("/set max_new_tokens=3")
        first = talk.say("A fox")
        before = saved(own_state)
        assert talk.say("/clear") == [f"a new conversation; genctl chat --open {before} continues the one before"]
        assert talk.say("/branch") == ["the chat is empty"]
        assert talk.say("A fox") == first  # without earlier messages
        assert talk.say("/set") == ["max_new_tokens = 3"]
        talk.press("/exit\r")
        assert talk.end() == 0
    (after,) = set(before.parent.iterdir()) - {before}
    one, other = before.read_text().splitlines(), after.read_text().splitlines()
    assert other == one
    assert genctl("chat", "--open", str(after), stdin="And then?\n").status == 0


def test_a_chat_is_edited_tried_again_and_undone(own_state: Path) -> None:
    with Talk(own_state, *QUIET, "--do-sample", "--seed", "3") as talk:
        first = talk.say("A fox")
        again = talk.say("/retry")
        assert again != first
        assert talk.say("/undo") == ["undone: the chat has 1 turn"]
        assert [line.split()[0] for line in talk.say("/branch")] == ["*", "2"]
        assert talk.say("/branch 1")[:2] == ["> A fox", first[0]]
        talk.press("/edit 1\r")
        talk.wait(lambda: talk.lines[-1] == "> A fox")
        talk.press(" and a hen\r")
        talk.wait(lambda: "> A fox and a hen" in talk.lines)
        talk.at_prompt()
        assert len(talk.say("/branch")) == 3
        assert talk.say("/branch 7") == ["error: there is no branch 7: there are 3 branches"]


def test_prompt_and_scores(own_state: Path) -> None:
    with Talk(own_state, *QUIET) as talk:
        talk.say("A fox")
        assert talk.say("/prompt") == ["3 tokens:", "1 35 1155", "<bos>A fox"]
        assert talk.say("/scores") == ["token probabilities are shown under each answer"]
        lines = talk.say("A hen")
        assert lines.count(next(line for line in lines if line.lstrip().startswith("step "))) == 1
        assert sum("%" in line and "▸" not in line for line in lines) == 12


def test_lines_go_on_history_is_kept_and_commands_are_completed(own_state: Path) -> None:
    with Talk(own_state, *QUIET) as talk:
        talk.press("A fox\x1b\rand a hen\x1b\rand a bear")
        talk.wait(lambda: "and a bear" in talk.lines[-1])
        talk.say("")
        talk.press("\x04")
        assert talk.end() == 0
    assert '"content": "A fox\\nand a hen\\nand a bear"' in saved(own_state).read_text()
    with Talk(own_state, *QUIET) as talk:
        talk.press("\x1b[A")
        talk.wait(lambda: talk.lines[-1].endswith("and a bear"))
        talk.press("\x03")
        talk.at_prompt().press("/ret\t")
        talk.wait(lambda: talk.lines[-1] == "> /retry")


def test_a_saved_chat_goes_on(own_state: Path) -> None:
    with Talk(own_state, *QUIET) as talk:
        answer = talk.say("A fox")
        talk.say(f"/save {own_state.parent / 'mine.jsonl'}")
        talk.press("\x04")
        talk.end()
    with Talk(own_state, "-q", "--open", "mine.jsonl") as talk:
        assert talk.lines[:2] == ["> A fox", answer[0]]


def test_a_dumb_terminal_gets_plain_lines(own_state: Path) -> None:
    with Talk(own_state, *QUIET, term="dumb") as talk:
        talk.press("A fox\r")
        talk.wait(lambda: "cut at max_new_tokens" in talk.lines)
        talk.at_prompt().press("/undo\r")
        talk.wait(lambda: any("undone" in line for line in talk.lines))
        talk.at_prompt().press("A hen\r")
        talk.wait(lambda: talk.lines.count("cut at max_new_tokens") == 2)
        talk.at_prompt().press("\x04")
        assert talk.end() == 0
        assert b"\x1b" not in talk.raw


def test_arguments_are_said_first_and_no_colour_is_used_where_there_is_to_be_none(own_state: Path) -> None:
    with Talk(own_state, *QUIET, "A fox", NO_COLOR="1") as talk:
        assert "> A fox" in talk.lines
        assert "cut at max_new_tokens" in talk.lines
        talk.press("\x04")
        talk.end()
        assert not re.search(rb"\x1b\[[\d;]*(3[0-7]|4[0-7]|38|48)[\d;]*m", talk.raw)


def test_a_terminal_that_ends_the_process_gets_its_settings_back(own_state: Path) -> None:
    with Talk(own_state, *QUIET) as talk:
        talk.say("A fox")
        talk.child.kill(signal.SIGTERM)
        assert talk.end() == 143
    assert '"role": "assistant"' in saved(own_state).read_text().splitlines()[-1]


def test_a_killed_answer_is_generated_anew_when_the_chat_goes_on(own_state: Path) -> None:
    """Killed while it writes: after continuing, the file has the bytes of a chat that was never killed."""
    files = {name: own_state.parent / f"{name}.jsonl" for name in ("whole", "killed")}
    options = ("-n", "120", "--do-sample", "--seed", "4")
    with Talk(own_state, *options, "--save", str(files["whole"])) as talk:
        talk.say("A fox")
    with Talk(own_state, *options, "--save", str(files["killed"])) as talk:
        talk.child.send("A fox\r")
        talk.wait(lambda: files["killed"].exists() and len(talk.lines) > 3)
        talk.child.kill(signal.SIGKILL)
    time.sleep(0.3)  # until the server of the tests has seen it
    assert files["killed"].read_bytes().count(b"\n") == 2
    with Talk(own_state, "--open", str(files["killed"])) as talk:
        assert "> A fox" in talk.lines
    assert files["killed"].read_bytes() == files["whole"].read_bytes()


def unwrapped(talk: Talk) -> str:
    """The screen as a terminal copies it: a full row continues in the next one."""
    return "".join(row.rstrip() if row.endswith(" ") else row for row in talk.screen.display)


@pytest.mark.parametrize("width", [30, 140])
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
        assert f"genctl chat --open '{path}'" in written  # only the terminal wraps it, and copies it unwrapped


def test_a_turn_that_does_not_fit_the_context_is_not_sent(own_state: Path) -> None:
    with Talk(own_state, "-q", "-n", "40", height=200, width=200) as talk:
        talk.say("A " + "bear " * 400)
        said = talk.say("A " + "hen " * 220)
        assert re.search(r"error: not sent: the prompt has \d+ tokens, but the model's context is 512", said[-2])
        assert said[-1].startswith("hint: /undo and /edit shorten the chat, /new begins another")
        assert talk.say("/branch")[0].startswith("* 1  1 turn")
        talk.say("/set truncate=left")
        assert "cut at max_new_tokens" in talk.say("A " + "hen " * 220)


def test_settings_are_written_as_people_write_them_and_checked_as_flags_are(own_state: Path) -> None:
    with Talk(own_state, *QUIET) as talk:
        assert talk.say("/set") == ["nothing is set here"]
        assert talk.say("/set top_p=7") == ["error: /set top_p: top_p = 7: must be at most 1"]
        assert talk.say("/set dtype=float16")[0].startswith("error: /set dtype: it belongs to the whole chat")
        assert "num_return_sequences = 2" in " ".join(talk.say("/set num_return_sequences=2"))
        assert talk.say("/preset nowhere")[0].startswith("error: preset nowhere: no such preset")
        assert talk.say("/set top_p 0.5") == ["/set top_p turns sampling on", "set top_p=0.5"]
        assert talk.say("/set top_k = 3") == ["set top_k=3"]  # sampling is on already
        assert talk.say("/set top-p") == ["top_p = 0.5 (/set top_p); /set top_p=VALUE sets it"]
        assert talk.say("/set top_q 1")[0].startswith("error: /set top_q: unknown key top_q; did you mean top_")
        assert talk.say("/set") == ["top_p = 0.5; top_k = 3"]
        assert talk.say("/retri") == [
            "error: there is no command /retri; did you mean /retry?",
            "hint: /help lists them; // begins a text with /",
        ]
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

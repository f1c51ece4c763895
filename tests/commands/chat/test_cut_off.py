"""A chat that was killed anywhere in a turn: it goes on, with the same answer where that can be."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from genctl.commands.chat.story import Story
from genctl.events import UNKNOWN_ID, Token
from genctl.tree.journal import Differs
from tests.cli.tool import Done, genctl
from tests.commands.chat.talk import Talk
from tests.commands.chat.test_saved import chat, story, written
from tests.engines.server.stand_in import Failure, StandIn, running

CUT = "the last answer was cut off; it is finished first"
ANEW = "the answer that was cut off comes out differently here, so its turn is answered anew"


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def places(lines: list[bytes], what: str) -> list[int]:
    return [place for place, line in enumerate(lines) if what.encode() in line]


def cut(whole: Path, name: str, tokens: int) -> Path:
    """The chat, killed in its last answer after so many tokens."""
    lines = lines_of(whole)
    path = whole.with_name(name)
    path.write_bytes(b"".join(lines[: places(lines, '"line": "answer')[-1] + 1 + tokens]))
    return path


def messages(path: Path) -> list[str]:
    one = Story.open(path)
    one.leave()
    return [message.content for message in one.conversation.here]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A greedy chat of two turns."""
    path = tmp_path / "whole.jsonl"
    done = chat("--save", str(path), "-n", "12", turns=("One day", "And then"))
    assert done.status == 0, done.err
    return path


def test_killed_at_any_line_a_chat_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    """Before the turn is said, while its tokens are given, before its answer, and within it."""
    whole = tmp_path / "whole.jsonl"
    chat("--save", str(whole), "-n", "3", "--do-sample", "--seed", "5", turns=("A fox", "A bear"))
    lines = lines_of(whole)
    answer, turn = places(lines, '"line": "answer')[-1], places(lines, '"line": "say')[-1]
    for place in (0, 1, 3, turn, turn + 2, answer - 1, answer, answer + 1, len(lines) - 2):
        path = tmp_path / f"cut{place}.jsonl"
        path.write_bytes(b"".join(lines[: place + 1]))
        turns = () if place >= turn else ("A bear",) if place else ("A fox", "A bear")
        done = chat("--open", str(path), turns=turns)
        assert done.status == 0, done.err
        assert written(path) == written(whole), (place, done.err)
        if place:
            assert ("no answer yet" in done.err) == (place < answer)
            assert (CUT in done.err) == (place >= answer)


@pytest.mark.parametrize("flags", [("-n", "4"), ("--max-time", "0.000001"), ("--set", "max_length=20")])
def test_a_smaller_limit_leaves_what_was_written(whole: Path, flags: tuple[str, ...]) -> None:
    path = cut(whole, "cut.jsonl", 9)
    before = messages(path)
    done = chat("--open", str(path), *flags, turns=())
    assert done.status == 0, done.err
    assert ANEW not in done.err
    assert messages(path) == before
    for _ in range(2):  # and no later turn is the worse for it
        done = chat("--open", str(path), "-n", "2", turns=("More", "And more"))
        assert (done.status, done.err) == (0, "")
    assert messages(path)[:4] == before


def test_other_tokens_are_answered_anew_and_said(whole: Path, tmp_path: Path) -> None:
    path = cut(whole, "cut.jsonl", 6)
    other = ("--do-sample", "--temperature", "3", "--seed", "8", "-n", "5", "--format", "jsonl")
    done = chat("--open", str(path), *other, turns=("More",))
    assert done.status == 0, done.err
    assert done.err.splitlines() == [f"note: {CUT}", f"note: {ANEW}"]
    assert len(done.records) == 1
    assert messages(path)[:3] == messages(whole)[:3]
    assert messages(path)[3] != messages(whole)[3]
    again = chat("--open", str(path), turns=("And more",))
    assert (again.status, again.err) == (0, "")
    one = Story.open(path)
    one.leave()
    assert len(one.conversation.branches) == 2, "what was written before stays, on a branch of its own"


def test_an_answer_that_was_drawn_for_a_row_with_an_id_comes_again(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    row = json.dumps({"id": "mine", "role": "user", "content": "A fox"})
    drawn = ("--input-format", "jsonl", "-n", "8", "--do-sample", "--seed", "5")
    chat("--save", str(whole), *drawn, turns=(row,))
    path = cut(whole, "cut.jsonl", 3)
    done = chat("--open", str(path), turns=())
    assert ANEW not in done.err
    assert written(path) == written(whole)


def test_a_turn_that_cannot_be_answered_is_not_said_at_the_next_opening(whole: Path) -> None:
    """Killed after the turn was said; then its answer fails each time."""
    lines = lines_of(whole)
    path = whole.with_name("cut.jsonl")
    path.write_bytes(b"".join(lines[: places(lines, '"line": "answer')[-1]]))
    wrong = chat("--open", str(path), "--regex", "a", "--set", "bad_words_ids=[[266]]", "-n", "2", turns=("More",))
    if wrong.status:
        assert messages(path) == messages(whole)[:2]
    assert chat("--open", str(path), "-n", "2", turns=("More",)).status == 0


def test_a_terminal_asks_whether_to_answer_anew(whole: Path, own_state: Path) -> None:
    for key, anew in (("a", True), ("k", False)):
        path = cut(whole, f"{key}.jsonl", 6)
        before = messages(path)
        flags = ("--open", str(path), "--do-sample", "--temperature", "3", "--seed", "8", "-n", "5")
        with Talk(own_state, *flags) as talk:
            talk.wait(lambda talk=talk: "[k]eep what was written?" in "\n".join(talk.lines))
            talk.press(f"{key}\r")
            talk.at_prompt()
            talk.say("More")
            talk.press("\x04")
            assert talk.end() == 0
        assert (messages(path)[:4] == before) == (not anew)
        assert len(messages(path)) == 6


def test_loading_a_chat_that_was_cut_off_finishes_it(whole: Path, own_state: Path) -> None:
    path = cut(whole, "cut.jsonl", 6)
    with Talk(own_state, "-n", "12") as talk:
        talk.at_prompt()
        talk.say(f"/load {path}")
        talk.press("\x04")
        assert talk.end() == 0
    assert messages(path) == messages(whole)


# -- servers ---------------------------------------------------------------------------------------------------------


def words_in(path: Path) -> list[str]:
    """The texts of the answer that the file has."""
    lines = [json.loads(line) for line in lines_of(path) if line.endswith(b"\n")]
    return [
        line.get("text", "") for line in lines if line["event"] == "grown" and line.get("by", "generate") == "generate"
    ]


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def test_what_a_server_streams_is_in_the_file_as_it_comes(tmp_path: Path) -> None:
    """The server goes on once the first words are in the file."""
    path = tmp_path / "chat.jsonl"
    seen: list[list[str]] = []

    def answer(write: Callable[[bytes], object]) -> None:
        write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for words in (["one"], [" two", " three"]):
            for word in words:
                write(event(word))
            until = time.monotonic() + 20
            while (not path.exists() or words[-1] not in words_in(path)) and time.monotonic() < until:
                time.sleep(0.01)
            seen.append(words_in(path) if path.exists() else [])
        write(event(" four") + event("", "stop") + b"data: [DONE]\n\n")

    with running(fault=lambda server, body: Failure(raw=answer) if body.get("stream") else None) as server:
        done = genctl("chat", "--backend", server.url, "--save", str(path), stdin="Hello\n")
    assert done.status == 0, done.err
    assert seen == [["one"], ["one", " two", " three"]]
    assert words_in(path) == ["one", " two", " three", " four"]


def server_chat(server: StandIn, path: Path, *more: str, turns: str = "") -> Done:
    return genctl("chat", "--backend", server.url, *more, "--open", str(path), stdin=turns)


def test_an_answer_of_a_server_is_finished_or_answered_anew(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    with running() as server:
        assert genctl("chat", "--backend", server.url, "--save", str(whole), stdin="Hello\n").status == 0
        path = cut(whole, "cut.jsonl", 3)
        done = server_chat(server, path)
        assert (done.status, ANEW in done.err) == (0, False)
        assert messages(path) == messages(whole)
        path = cut(whole, "other.jsonl", 3)
        server.words = (" one", " other")
        done = server_chat(server, path, turns="More\n")
        assert (done.status, ANEW in done.err) == (0, True)
        assert messages(path)[1] == " one other"


def test_a_server_that_is_gone_leaves_the_answer_as_it_was(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    with running() as server:
        genctl("chat", "--backend", server.url, "--save", str(whole), stdin="Hello\n")
        path = cut(whole, "cut.jsonl", 3)
        content = path.read_bytes()
        server.fault = lambda server, body: Failure(404, b'{"error": {"message": "no"}}')
        assert server_chat(server, path).status == 3
        assert path.read_bytes() == content
        server.fault = lambda server, body: None
        assert server_chat(server, path).status == 0
    assert messages(path) == messages(whole)


def pieces(*texts: str, known: bool = False) -> list[Token]:
    return [Token(number if known else UNKNOWN_ID, -1.0, text) for number, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        (("one", " two"), ("one", " two", " three"), [" three"]),
        (("one", " two"), ("one two three",), [" three"]),
        (("one", " two"), ("o", "ne", " t", "wo", " three"), [" three"]),
        (("one", " two"), ("one t",), []),
        (("one two",), ("one", " two", "!"), ["!"]),
        (("one", "", " two"), ("one two", "!"), ["!"]),
        ((), ("one",), ["one"]),
        (("one", " two"), ("one", " three"), None),
        (("one two",), ("one three",), None),
    ],
)
def test_texts_are_the_same_in_whatever_pieces_they_come(
    before: tuple[str, ...], after: tuple[str, ...], new: list[str] | None, tmp_path: Path
) -> None:
    one = story(tmp_path / "chat.jsonl")
    one.begin_answer(one.give('say "x"', [1], [""]), "", {})
    for token in pieces(*before):
        one.token(token, None)
    one.leave()
    one = Story.open(tmp_path / "chat.jsonl")
    content = one.journal.content()
    start, prefill, _ = one.written()

    def feed() -> None:
        with one.again():
            one.begin_answer(start, prefill, {})
            for token in pieces(*after):
                one.token(token, None)
            one.end_answer()

    if new is None:
        with pytest.raises(Differs):
            feed()
        assert one.journal.content() == content
        assert one.cut_off
    else:
        feed()
        assert words_in(tmp_path / "chat.jsonl") == [*before, *new]
        assert one.conversation.messages[-1].content == "".join([*before, *new])
    one.close()
    again = Story.open(tmp_path / "chat.jsonl")
    again.close()
    assert (again.tree, again.conversation) == (one.tree, one.conversation)

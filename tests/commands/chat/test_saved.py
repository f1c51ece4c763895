"""A chat that is saved: what its file adds up to, after any undo and any kill."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.commands.chat.story import Story, edited, said
from genctl.events import Token
from genctl.io.output import open_beside
from genctl.kernels.ops import library
from genctl.tree.changes import SCHEMA, Opened
from genctl.tree.nodes import Tree
from tests.cli.tool import Done, genctl

DRAWN = ("-n", "10", "--do-sample", "--seed", "5", "--format", "jsonl")


def written(file: Path) -> bytes:
    """The file; where the products of the native runtime are not compiled, without the last digits of numbers."""
    content = file.read_bytes()
    return content if library() is not None else re.sub(rb'"logprob": [^,}]+', b"", content)


def chat(*arguments: str, turns: tuple[str, ...]) -> Done:
    return genctl("chat", *arguments, stdin="".join(f"{turn}\n" for turn in turns))


def test_a_chat_goes_on_with_the_bytes_that_it_would_have_had(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    one = chat("--save", str(whole), *DRAWN, turns=("A fox", "A bear", "A hen"))
    assert one.status == 0, one.err
    first = chat("--save", str(parts), *DRAWN, turns=("A fox",))
    then = chat("--open", str(parts), "--format", "jsonl", turns=("A bear", "A hen"))
    assert then.status == 0, then.err
    texts = [record["text"] for record in (*first.records, *then.records)]
    assert texts == [record["text"] for record in one.records]
    assert written(parts) == written(whole)


def test_a_chat_that_was_killed_after_any_line_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    """Killed within the first answer, or between any two lines of the second turn."""
    whole = tmp_path / "whole.jsonl"
    chat("--save", str(whole), *DRAWN, turns=("A fox", "A bear"))
    lines = whole.read_bytes().splitlines(keepends=True)
    answers = [place for place, line in enumerate(lines) if b'"line": "answer' in line]
    ends = [place for place, line in enumerate(lines) if b'"settled"' in line]
    (last,) = [end for end in ends if end > answers[1]]
    for place in (answers[1], answers[1] + 3, last - 1):
        cut = tmp_path / f"cut{place}.jsonl"
        cut.write_bytes(b"".join(lines[: place + 1]) + lines[place + 1][:20])  # and a line that is not whole
        done = chat("--open", str(cut), turns=())
        assert done.status == 0, done.err
        assert "the last answer was cut off; it is finished first" in done.err
        assert written(cut) == written(whole)


def test_a_chat_keeps_the_settings_that_it_began_with(tmp_path: Path) -> None:
    file = str(tmp_path / "chat.jsonl")
    chat("--save", file, "-n", "3", "--format", "jsonl", turns=("A fox",))
    assert chat("--open", file, "--format", "jsonl", turns=("More",)).records[0]["usage"]["new_tokens"] == 3
    assert chat("--open", file, "-n", "5", "--format", "jsonl", turns=("More",)).records[0]["usage"]["new_tokens"] == 5


def test_a_chat_of_another_state_of_a_checkpoint_continues_where_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    assert chat("--save", str(file), "-n", "3", turns=("A fox",)).status == 0
    first, *rest = file.read_text().splitlines(keepends=True)
    opened = json.loads(first)
    file.write_text(json.dumps({**opened, "checkpoint": "sha256:0"}) + "\n" + "".join(rest))
    refused = chat("--open", str(file), turns=("More",))
    assert refused.status == 2
    assert refused.err.startswith(
        f"error: -m builtin:stories continues {file} with this checkpoint: the chat was begun"
    )
    done = chat("--open", str(file), "-m", "builtin:stories", "-n", "2", turns=("More",))
    assert (done.status, len(done.out.splitlines())) == (0, 1), done.err
    assert "builtin:stories continues it, as -m says" in done.err


def test_files_that_are_not_this_chat_are_refused(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    file, other = tmp_path / "chat.jsonl", tmp_path / "other.jsonl"
    assert chat("--save", str(file), "-n", "2", turns=("A fox",)).status == 0
    assert file.stat().st_mode & 0o777 == 0o600
    wrong = chat("--open", str(file), "-m", "builtin:numbers", turns=("Hi",))
    assert wrong.status == 2
    assert "was begun with builtin:stories, whose tokens are not those of builtin:numbers" in wrong.err
    template = chat("--open", str(file), "-m", checkpoints["chatml"], turns=("Hi",))
    assert (template.status, "the prompt begins with other tokens" in template.err) == (1, True)
    refused = chat("--save", str(file), turns=("Hi",))
    assert (refused.status, "exists already" in refused.err) == (2, True)
    assert chat("--save", str(file), "--force", "-n", "1", turns=("Hi",)).status == 0
    script = tmp_path / "script"
    for line in ("take 1", "edit  cat", "set top_k=3", "left"):
        script.write_text(f"{line}\n")
        other.unlink(missing_ok=True)
        assert genctl("explore", "A fox", "--save", str(other), "--script", str(script)).status == 0
        assert "is a tree of genctl explore, not a chat" in chat("--open", str(other), turns=("Hi",)).err
    other.write_text("no tree\n")
    assert chat("--open", str(other), turns=("Hi",)).status == 2


# -- without a model ---------------------------------------------------------------------------------------------------


def story(path: Path | None = None) -> Story:
    opened = Opened(SCHEMA, "tiny", "sha256:0", "", (), 3)
    return Story(Tree(opened), new_file=None if path is None else lambda words: open_beside(path))


def answer(one: Story, line: str, ids: list[int], written: list[int]) -> None:
    end = one.give(line, ids, [f"<{id}>" for id in ids])
    one.begin_answer(end, "", {})
    for id in written:
        one.token(Token(id, -1.0, f"[{id}]"), None)
    one.end_answer()


def contents(one: Story) -> list[str]:
    return [message.content for message in one.conversation.here]


def test_undo_takes_a_turn_with_its_answer_and_a_retry_alone() -> None:
    one = story()
    answer(one, said("Hello"), [1, 2], [7, 8])
    answer(one, "read", [1, 2], [9])
    assert contents(one) == ["Hello", "[9]"]
    one.undo()
    assert contents(one) == ["Hello", "[7][8]"]
    one.undo()
    assert contents(one) == []
    one.redo()
    assert contents(one) == ["Hello", "[7][8]"]
    one.redo()
    assert contents(one) == ["Hello", "[9]"]


def test_an_answer_that_failed_was_not_asked_for() -> None:
    one = story()
    answer(one, said("Hello"), [1, 2], [7])
    end = one.give(said("More"), [1, 2, 7, 3], ["", "", "", ""])
    one.begin_answer(end, "", {})
    one.abandon()
    assert contents(one) == ["Hello", "[7]"]
    answer(one, edited(1, "Bye"), [1, 5], [6])
    assert contents(one) == ["Bye", "[6]"]


IDS = st.integers(1, 3)
ACTION = st.one_of(
    st.tuples(st.just("say"), st.lists(IDS, min_size=1, max_size=3), st.lists(IDS, min_size=1, max_size=3)),
    st.tuples(st.just("retry"), st.lists(IDS, min_size=1, max_size=3)),
    st.tuples(st.just("edit"), st.lists(IDS, min_size=1, max_size=3), st.lists(IDS, min_size=1, max_size=3)),
    st.tuples(st.just("branch"), st.integers(1, 4)),
    st.tuples(st.just("set"), st.sampled_from(["top_k=3", "top_k=4"])),
    st.tuples(st.just("undo")),
    st.tuples(st.just("redo")),
)


def perform(one: Story, action: tuple[object, ...]) -> None:
    """Do an action as a chat does; what cannot be done now is left out."""
    conversation = one.conversation
    name, *rest = action
    prompt = [id for message in conversation.here for id in one.tree.ids(message.node)][-3:]
    if name == "say":
        answer(one, said(str(rest[0])), prompt + rest[0], rest[1])
    elif name == "retry" and conversation.turns_to(conversation.at):
        answer(one, "read", list(one.tree.ids(conversation.turn(None).node)), rest[0])
    elif name == "edit" and conversation.turns_to(conversation.at):
        answer(one, edited(1, str(rest[0])), rest[0], rest[1])
    elif name == "branch" and rest[0] <= len(conversation.branches):
        one.do("branch", str(rest[0]), node=conversation.branch(rest[0]).node)
    elif name == "set":
        one.do("set", str(rest[0]))
    elif name == "undo" and one.tree.steps:
        one.undo()
    elif name == "redo" and one.tree.undone:
        one.redo()


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTION, max_size=12))
def test_any_chat_that_is_opened_again_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[object, ...]]
) -> None:
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    one = story(path)
    for action in actions:
        perform(one, action)
    one.close()
    if not path.exists():
        assert one.tree.steps == []
        return
    again = Story.open(path)
    again.close()
    assert again.tree == one.tree
    assert again.conversation == one.conversation
    assert again.settings == one.settings
    assert json.loads(path.read_text().partition("\n")[0])["event"] == "opened"


@settings(max_examples=40, deadline=None)
@given(st.lists(ACTION, min_size=1, max_size=10))
def test_everything_can_be_undone_and_done_again(actions: list[tuple[object, ...]]) -> None:
    one = story()
    for action in actions:
        perform(one, action)
    before, steps = copy.deepcopy(one.conversation), len(one.tree.steps)
    moves = 0
    while one.tree.steps:
        one.undo()
        moves += 1
        assert seen(one) == seen(Story(one.tree))
    assert contents(one) == []
    for _ in range(moves):
        one.redo()
        assert seen(one) == seen(Story(one.tree))
    assert len(one.tree.steps) == steps
    assert one.conversation == before


def seen(one: Story) -> tuple[object, ...]:
    """All that a chat knows of its conversation."""
    talk = one.conversation
    numbers = [None, *range(len(talk.messages))]
    turns = [talk.turn(number) for number in range(1, talk.turns_to(talk.at) + 1)]
    assert turns == [message for message in talk.here if message.role == "user"]
    parents = {message.parent for message in talk.messages}
    assert talk.branches == [message for message in talk.messages if message.number not in parents]
    for number in numbers:
        assert talk.children(number) == [message for message in talk.messages if message.parent == number]
    return talk, talk.branches, turns, one.settings, one.left_out

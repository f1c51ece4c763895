"""The log of a chat, without a model: branches, undo, and a file with the same content."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.commands.chat.log import SCHEMA, ChatHeader, ChatLog, Message
from genctl.errors import InputError, UsageError
from genctl.io.output import open_beside


def log(path: Path | None = None) -> ChatLog:
    header = ChatHeader(SCHEMA, "tiny", "sha256:0", 3)
    return ChatLog(header, None if path is None else lambda words: open_beside(path))


def turn(one: ChatLog, text: str, answer: str, parent: int | None = -1) -> None:
    """A turn after the last message, or after `parent`."""
    question = one.add_message("user", text, one.end if parent == -1 else parent, seed=1)
    one.add_message("assistant", answer, question.id, seed=1, token_ids=(7, 8))


def contents(one: ChatLog) -> list[str]:
    return [message.content for message in one.here]


# -- branches ----------------------------------------------------------------------------------------------------------


def forked() -> ChatLog:
    """Two turns; the second has two answers, and the first was edited."""
    one = log()
    turn(one, "one", "1")
    turn(one, "two", "2")
    one.add_message("assistant", "2b", 2)
    turn(one, "uno", "I", parent=None)
    return one


def test_a_branch_is_its_messages_from_the_first() -> None:
    one = forked()
    assert contents(one) == ["uno", "I"]
    assert [message.content for message in one.branches] == ["2", "2b", "I"]
    one.change("go", one.branch(2).id)
    assert contents(one) == ["one", "1", "two", "2b"]
    assert (one.turn().content, one.turn(1).content) == ("two", "one")
    assert len(one.answers(2)) == 2
    with pytest.raises(UsageError, match="there is no turn 3: this branch has 2 turns"):
        one.turn(3)
    with pytest.raises(UsageError, match="there is no branch 4: there are 3 branches"):
        one.branch(4)


# -- undo --------------------------------------------------------------------------------------------------------------


def test_undo_goes_to_where_the_chat_was() -> None:
    one = log()
    turn(one, "Hello", "Hi")
    one.add_message("assistant", "Yes?", 0)
    one.change("set", "top_k=3")
    assert contents(one) == ["Hello", "Yes?"]
    one.undo()
    assert contents(one) == ["Hello", "Hi"]
    one.undo()
    assert contents(one) == []
    assert len(one.branches) == 2, "what was undone is there"
    assert [name for name, _, _ in one.settings] == ["set"], "a setting is no turn"
    with pytest.raises(UsageError, match="there is nothing to undo"):
        one.undo()
    one.change("go", 2)
    one.change("go", 1)
    one.undo()
    assert contents(one) == ["Hello", "Yes?"]


def test_a_turn_without_an_answer_is_no_branch() -> None:
    one = log()
    turn(one, "Hello", "Hi")
    one.add_message("user", "More", 1, seed=1)
    assert one.unanswered
    one.undo()
    assert contents(one) == ["Hello", "Hi"]
    assert [message.content for message in one.branches] == ["Hi"]


ACTION = st.one_of(
    st.tuples(st.sampled_from(["say", "edit", "retry", "hear", "undo"])),
    st.tuples(st.just("go"), st.integers(1, 4)),
    st.tuples(st.just("set"), st.integers(1, 4)),
)


def perform(one: ChatLog, action: tuple[str, ...]) -> None:
    """Perform an action as a chat does; skip it if it is not possible now."""
    name, *rest = action
    if name == "say":
        turn(one, "a turn", "an answer")
    elif name in ("edit", "retry") and one.turns_to(one.end):
        question = one.turn()
        if name == "edit":
            turn(one, "other words", "an answer", parent=question.parent)
        else:
            one.add_message("assistant", "another", question.id)
    elif name == "hear":
        one.add_message("system", "Be kind.", one.end)
    elif name == "go" and rest[0] <= len(one.branches):
        one.change("go", one.branch(rest[0]).id)
    elif name == "set":
        one.change("set", f"top_k={rest[0]}")
    elif name == "undo" and len(one.ends) > 1:
        one.undo()


def seen(one: ChatLog) -> tuple[object, ...]:
    """The whole state of a conversation."""
    settings = [(name, value) for name, value, _ in one.settings]
    return list(one.messages.values()), one.end, settings


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTION, max_size=12))
def test_any_chat_that_is_opened_again_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, ...]]
) -> None:
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    one = log(path)
    for action in actions:
        perform(one, action)
    one.close()
    if not path.exists():
        assert not one.messages
        return
    again = ChatLog.open(path)
    again.close()
    assert seen(again) == seen(one)
    assert not any(change.typed for change in again.settings)
    for each in (one, again):
        each.sink = each.new_file = None
        turn(each, "the next one", "has")
    assert seen(again) == seen(one), "ids go on"


# -- a file from an untrusted source -----------------------------------------------------------------------------------


def test_a_file_begins_with_the_first_message(tmp_path: Path) -> None:
    """A setting alone made a file without words in its name, which `--continue` took for the last chat."""
    path = tmp_path / "chat.jsonl"
    one = log(path)
    one.change("set", "temperature=0.5")
    assert (one.path, list(tmp_path.iterdir())) == (None, [])
    turn(one, "one", "1")
    assert [line for line in ChatLog.look(path).lines if "set" in line] == [{"set": "temperature=0.5"}]
    one.close()


def test_a_file_has_one_line_a_message(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    one = log(path)
    turn(one, "Hello", "Hi")
    one.change("set", "top_k=3")
    one.undo()
    one.close()
    assert path.read_text().splitlines()[1:] == [
        '{"id": 0, "parent": null, "role": "user", "content": "Hello", "seed": 1}',
        '{"id": 1, "parent": 0, "role": "assistant", "content": "Hi", "seed": 1, "token_ids": [7, 8]}',
        '{"set": "top_k=3"}',
        '{"go": null}',
    ]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("[]", "a line is a JSON object"),
        ("{", "line 4"),
        ("{}", "'' is no line of a chat"),
        ('{"run": "rm"}', "'run' is no line of a chat"),
        ('{"set": 3}', "line 4"),
        ('{"set": "top_k=3", "go": 1}', "is no line of a chat"),
        ('{"go": 7}', "there is no message 7"),
        ('{"id": 1, "parent": 0, "role": "user", "content": "x"}', "message 1 is there already"),
        ('{"id": 2, "parent": 5, "role": "user", "content": "x"}', "there is no message 5"),
        ('{"id": 2, "parent": 1, "role": "tool", "content": "x"}', "role"),
        ('{"id": 2, "parent": 1, "role": "user", "content": 3}', "content"),
        ('{"id": 2, "parent": 1, "role": "user", "content": "x", "code": "y"}', "code"),
    ],
)
def test_a_damaged_line_is_named(line: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    one = log(path)
    turn(one, "Hello", "Hi")
    one.close()
    with path.open("a") as file:
        file.write(f"{line}\n")
    content = path.read_bytes()
    for _ in range(2):  # the lock must be released
        with pytest.raises(InputError) as error:
            ChatLog.open(path)
        assert "is damaged at line 4" in error.value.message
        assert wrong in error.value.message
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ('{"schema": "genctl-tree/2"}', "is not the file of a chat"),
        ('{"schema": "genctl-chat/9"}', "is not the file of a chat"),
        ('{"schema": "genctl-chat/1", "model": 3}', "is damaged at line 1"),
        ("no chat", "is not the file of a chat"),
    ],
)
def test_a_file_of_another_format_is_refused(first: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(f"{first}\n")
    with pytest.raises(InputError, match=message):
        ChatLog.open(path)


def test_messages_keep_what_they_were_said_with(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    one = log(path)
    fields = {"seed": 2**53 - 1, "finish_reason": "stop", "prefill": "Well", "token_ids": (1,)}
    message = one.add_message("assistant", "Well, yes", None, **fields)
    one.close()
    (found,) = ChatLog.look(path).messages.values()
    assert found == message == Message(0, None, "assistant", "Well, yes", 2**53 - 1, "stop", "Well", (1,))

"""`genctl chat` without a terminal: turns from a pipe, answers to a pipe, and which tokens the model reads."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from genctl.events import conversation
from genctl.kernels.ops import library
from tests.cli.tool import Done, genctl
from tests.commands.chat.templates import KINDS

TURNS = ("Once upon a time there was a fox.", "What did the fox find?", "Tell me the end.")


def chat(*arguments: str, turns: Any = TURNS, **how: Any) -> Done:
    return genctl("chat", *arguments, stdin="".join(f"{turn}\n" for turn in turns), **how)


def run_alike(model: str, messages: list[dict[str, str]], record: dict[str, Any], folder: Path, *knobs: str) -> Any:
    """The record of `genctl run` for the same messages, with the seed of `record`."""
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    seed = [] if record["seed"] is None else ["--seed", str(record["seed"])]
    done = genctl("run", "-m", model, "-i", str(rows), "--format", "jsonl", *knobs, *seed)
    assert done.status == 0, done.err
    return done.records[0]


@pytest.mark.parametrize("knobs", [(), ("--do-sample", "--temperature", "0.9", "--seed", "7")], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_answers_equal_those_of_run(
    kind: str, knobs: tuple[str, ...], checkpoints: dict[str, str], tmp_path: Path
) -> None:
    settings = ("-n", "16", *knobs)
    done = chat("-m", checkpoints[kind], *settings, "--format", "jsonl")
    assert done.status == 0, done.err
    assert len(done.records) == 3
    messages = []
    for turn, record in zip(TURNS, done.records, strict=True):
        messages.append({"role": "user", "content": turn})
        alike = run_alike(checkpoints[kind], messages, record, tmp_path, *settings)
        numbers = {} if library() is not None else {"logprob": None, "score": None}  # torch's last digits may differ
        assert {**record, "id": "0", "usage": None, **numbers} == {**alike, "usage": None, **numbers}
        assert record["usage"]["prompt_tokens"] == alike["usage"]["prompt_tokens"]
        messages.append({"role": "assistant", "content": record["text"]})
    if knobs:
        assert len({record["seed"] for record in done.records}) == 3
        assert done.records[0]["seed"] == 7


@pytest.mark.parametrize("kind", ["chatml", "llama3", "gemma", "mistral"])
def test_only_the_new_turn_is_read(kind: str, checkpoints: dict[str, str]) -> None:
    begun = " The fox" if kind == "mistral" else "The fox"  # without blanks that the template would strip
    records = chat("-m", checkpoints[kind], "-n", "12", "--format", "jsonl", "--prefill", begun).records
    for before, after in pairwise(records):
        known = before["usage"]["prompt_tokens"] + before["usage"]["new_tokens"] - 1  # the last token is never read
        assert known - 1 <= after["usage"]["reused_tokens"] <= known + 1  # a word may be tokenised differently
    assert records[0]["usage"]["reused_tokens"] == 0


def test_a_thought_that_the_template_drops_is_not_in_the_cache_of_the_next_turn(checkpoints: dict[str, str]) -> None:
    options = ("-m", checkpoints["reasoning"], "-n", "12", "--format", "jsonl", "--prefill", "<think>A fox?</think>")
    records = chat(*options).records
    first, second = records[:2]
    assert first["prompt"].endswith("<|im_start|>assistant\n<think>A fox?</think>")
    assert "<think>A fox" not in second["prompt"].removesuffix("<think>A fox?</think>")
    assert first["text"].strip() in second["prompt"]
    begun = first["prompt"].removesuffix("<think>A fox?</think>")
    assert second["prompt"].startswith(begun)
    # the first prompt up to the thought is reused, and nothing after it
    assert 0 < second["usage"]["reused_tokens"] < first["usage"]["prompt_tokens"]


def test_text_is_an_answer_a_line_and_nothing_else(checkpoints: dict[str, str]) -> None:
    records = chat("-m", checkpoints["chatml"], "-n", "8", "--format", "jsonl").records
    done = chat("-m", checkpoints["chatml"], "-n", "8")
    assert done.out == "".join(f"{record['text']}\n" for record in records)
    assert done.err == ""
    assert done.status == 0


def test_a_pipe_without_lines_ends_at_once() -> None:
    done = genctl("chat", stdin="")
    assert (done.status, done.out, done.err) == (0, "", "note: no prompts: stdin is empty\n")


def test_without_turns_and_without_a_terminal_there_is_short_help() -> None:
    done = genctl("chat")  # a terminal for input, none for output
    assert done.status == 2
    assert done.out == ""
    assert "No turn: give one as an argument" in done.err


def test_messages_of_other_roles_are_heard_and_not_answered(checkpoints: dict[str, str], tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello, fox."},
        {"role": "user", "content": "Who are you?"},
    ]
    rows = tmp_path / "chat.jsonl"
    rows.write_text("".join(f"{json.dumps(message)}\n" for message in messages))
    done = genctl("chat", "-m", checkpoints["chatml"], "-i", str(rows), "-n", "8", "--format", "jsonl")
    assert [record["id"] for record in done.records] == ["1", "3"]
    first, second = done.records
    messages.insert(2, {"role": "assistant", "content": first["text"]})
    assert second["prompt"].count("<|im_start|>") == 6
    assert conversation(messages).count("Hello") == 2
    assert "Hello, fox." in second["prompt"]


def test_messages_that_a_saved_chat_cannot_hold_are_refused(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """Regression: a tool's message made the saved file unreadable."""
    messages = [{"role": "tool", "content": "42"}, {"role": "user", "content": "Why?"}]
    rows = [json.dumps({"messages": messages}), json.dumps({"prompt": "Hi"})]
    saved, common = str(tmp_path / "chat.jsonl"), ("-m", checkpoints["chatml"], "-n", "4", "--format", "jsonl")
    done = chat(*common, "--input-format", "jsonl", "--save", saved, turns=rows)
    assert done.status == 1
    assert "no calls of tools" in done.records[0]["error"]["message"]
    again = chat(*common, "--open", saved, turns=["Go on"])
    assert (again.status, len(again.records)) == (0, 1)


def test_a_row_may_bring_a_whole_conversation_an_id_and_params(checkpoints: dict[str, str]) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    row = {"id": "x", "messages": [*messages, {"role": "user", "content": "Go on"}], "params": {"max_new_tokens": 3}}
    done = chat("-m", checkpoints["chatml"], "--input-format", "jsonl", "--format", "jsonl", turns=[json.dumps(row)])
    assert done.records[0]["id"] == "x"
    assert done.records[0]["usage"]["new_tokens"] == 3
    assert "Yes?" in done.records[0]["prompt"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"role": "tool", "content": "x"}', "role: expected 'system', 'user' or 'assistant', got 'tool'"),
        ('{"role": "user"}', "content: expected here, but missing"),
        ('{"role": "user", "content": "x", "name": "y"}', "unknown field 'name'"),
        ('{"prompt_ids": [3]}', "a chat is made of texts: prompt_ids has no place in it"),
        (
            '{"role": "user", "content": "x", "params": {"num_beams": 2, "num_return_sequences": 2}}',
            "/retry gives another",
        ),
    ],
)
def test_a_row_that_cannot_be_said_fails_and_the_chat_goes_on(row: str, message: str) -> None:
    turns = [row, '{"role": "user", "content": "Hello"}']
    done = chat("--input-format", "jsonl", "--format", "jsonl", "-n", "2", turns=turns)
    assert done.status == 1
    assert message in done.records[0]["error"]["message"]
    assert done.records[1]["prompt"] == "<bos>Hello"  # without the failed turn


def test_a_turn_that_does_not_fit_fails_and_was_not_said(tmp_path: Path) -> None:
    turns = ["Hello", "word " * 600, "Bye"]
    done = chat("-n", "4", "--format", "jsonl", turns=turns)
    assert done.status == 1
    first, second, third = done.records
    assert "the model's context is 512" in second["error"]["message"]
    assert third["prompt"] == f"<bos>Hello{first['text']} Bye"


def test_a_checkpoint_without_a_template_goes_on_with_the_text(checkpoints: dict[str, str]) -> None:
    done = chat("-m", checkpoints["plain"], "-n", "6", "--format", "jsonl", turns=["The fox", " and the bear"])
    assert "has no chat template: it continues the text" in done.err
    first, second = done.records
    assert second["prompt"] == f"The fox{first['text']} and the bear"
    assert done.err.count("no chat template") == 1


@pytest.mark.parametrize("begun", ["The fox", "Well, ", " I"])
@pytest.mark.parametrize("kind", ["chatml", "llama3", "gemma", "mistral"])
def test_a_prefill_is_read_as_the_template_has_it_in_the_next_turn(
    kind: str, begun: str, checkpoints: dict[str, str]
) -> None:
    """Regression: it was appended unchanged, so the next turn was read again if the template strips or adds blanks."""
    options = ("-m", checkpoints[kind], "-n", "6", "--format", "jsonl", "--prefill", begun)
    first, second = chat(*options, turns=["Hi", "More"]).records
    assert second["prompt"].startswith(first["prompt"])


def test_a_bos_that_stands_twice_gets_one_note() -> None:
    done = chat("-n", "2", turns=["<bos>Once", "More", "<bos>"])
    note = "note: the prompt begins with <bos> twice: the chat template writes it before a message that begins with it"
    assert done.err.count("note:") == 1
    assert done.err.startswith(f"{note}; leave <bos> out")
    assert chat("-n", "2", "-q", turns=["<bos>Once"]).err == ""
    assert chat("-n", "2", turns=["Once <bos>"]).err == ""


def test_a_prefill_begins_every_answer_and_stays_in_the_history(checkpoints: dict[str, str]) -> None:
    options = ("-m", checkpoints["chatml"], "-n", "4", "--format", "jsonl", "--prefill", "Well")
    first, second = chat(*options, turns=["Hi", "More"]).records
    assert first["prompt"].endswith("<|im_start|>assistant\nWell")
    assert not first["text"].startswith("Well")
    assert f"assistant\nWell{first['text']}<|im_end|>" in second["prompt"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("-m", "gemma", "--system", "Be kind"), 2, "System role not supported"),
        (("-m", "plain", "--system", "Be kind"), 2, "has no chat template for it"),
        (("--set", "num_return_sequences=3"), 2, "num_return_sequences = 3 (--set num_return_sequences): a turn has"),
        (("--token-healing",), 2, "token_healing = true (flag --token-healing): an answer begins behind"),
        (("--prefill", ""), 2, "--prefill is empty"),
        (
            ("-m", "builtin:numbers"),
            3,
            "builtin:numbers is an encoder-decoder, which reads no conversation",
        ),
        (
            ("--prefill", "x", "--backend", "openai:http://localhost:1/v1"),
            2,
            "--prefill begins the answer in the prompt",
        ),
        (("--open", "x.jsonl", "--save", "y.jsonl"), 2, "--save y.jsonl begins a new file, but --open x.jsonl"),
        (("--open", "nowhere.jsonl"), 2, "cannot read nowhere.jsonl: no such file"),
        (("--scores",), 2, "--format jsonl --scores has them"),
        (("--force",), 2, "--force replaces"),
        (("--memory", "1GiB"), 2, "chat --memory was removed: "),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_turn(
    arguments: tuple[str, ...], status: int, message: str, checkpoints: dict[str, str]
) -> None:
    done = chat(*(checkpoints.get(word, word) for word in arguments))
    assert done.status == status
    assert done.out == ""
    assert message in " ".join(done.err.split())


def test_scores_are_in_records() -> None:
    done = chat("--scores", "--format", "jsonl", "-n", "2", turns=["Hi"])
    assert [set(token) >= {"id", "rank", "entropy", "logprob"} for token in done.records[0]["tokens"]] == [True, True]

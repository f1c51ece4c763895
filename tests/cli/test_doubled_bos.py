"""A prompt that begins with BOS twice is said: the tokenizer or the template writes one before that of the user."""

from __future__ import annotations

import json

import pytest

from tests.cli.tool import genctl

RAW = (
    "the prompt begins with <bos> twice: the tokenizer writes it before each prompt; leave <bos> out of what you write"
)
CHAT = (
    "the prompt begins with <bos> twice: the chat template writes it before a message that begins with it; "
    "leave <bos> out of what you write"
)
ROW = json.dumps({"messages": [{"role": "user", "content": "<bos>Hi"}]})
WAYS: dict[str, tuple[tuple[str, ...], str, str | None]] = {
    "run": (("run", "-n", "2", "<bos>Once"), RAW, None),
    "beam": (("beam", "-n", "2", "<bos>Once"), RAW, None),
    "compare": (("compare", "-n", "2", "--strategy", "greedy", "--strategy", "beam", "<bos>Once"), RAW, None),
    "explore": (("explore", "--expand", "depth=1,nodes=2", "<bos>Once"), RAW, None),
    "--chat": (("run", "-n", "2", "--chat", "<bos>Once"), CHAT, None),
    "messages": (("run", "-n", "2", "--input-format", "jsonl"), CHAT, ROW),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_doubled_bos_gets_a_note_with_advice(way: str) -> None:
    arguments, note, stdin = WAYS[way]
    done = genctl(*arguments, stdin=stdin)
    assert done.status == 0, done.err
    assert done.err.count(note) == 1
    assert note not in genctl(*arguments, "-q", stdin=stdin).err


@pytest.mark.parametrize("prompt", ["Once", "Once <bos>", "<eos>Once", " <bos>Once"])
def test_no_other_prompt_gets_one(prompt: str) -> None:
    assert "twice" not in genctl("run", "-n", "2", prompt).err


def test_many_prompts_get_one_note() -> None:
    done = genctl("run", "-n", "2", "a", "<bos>b", "<bos>c")
    assert done.err.count("twice") == 1
    assert f"note: prompt 2: {RAW}" in done.err

"""Chat with the built-in checkpoints: what an answer wrote is what the template gives back in the next turn."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import genctl as package
from genctl.api import Model, load
from genctl.models.chat import render_chat_text
from genctl.models.text import encode
from tests.cli.tool import genctl

ENDS: dict[str, dict[str, Any]] = {
    "length": {"max_new_tokens": 30},
    "stop": {"max_new_tokens": 60, "stop_strings": ["."]},
    "eos": {"max_new_tokens": 400},
    "drawn": {"max_new_tokens": 40, "do_sample": True, "seed": 5},
}
OPENINGS = ("Once upon a time", "The little fox", "Mia was a", "One day, a bear said:")


@cache
def stories() -> Model:
    return load("builtin:stories")


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("opening", OPENINGS)
def test_the_template_gives_back_the_tokens_that_were_written(opening: str, end: str) -> None:
    model = stories()
    result = model.generate([said(opening)], **ENDS[end])[0]
    one = result.sequences[0]
    if end != "drawn":
        assert one.finish_reason == end
    eos = model.tokenizer.eos_token_id
    written = [id for id in one.token_ids if id != eos]
    if end == "stop":
        written = written[:-1]  # the token that writes the stop is not part of the text
    chats = said(opening), said(opening, one.hypothesis.text, "And then?")
    texts = (render_chat_text(model.tokenizer, chat) for chat in chats)
    read, again = (encode(model.tokenizer, text, add_special_tokens=False) for text in texts)
    assert again[: len(read) + len(written)] == [*read, *written]


def test_a_turn_reuses_all_that_was_read_and_written() -> None:
    turns = "".join(f"{opening}.\n" for opening in OPENINGS)
    records = genctl("chat", "-n", "12", "--format", "jsonl", stdin=turns).records
    assert len(records) == len(OPENINGS)
    before = 0
    for record in records:
        usage = record["usage"]
        assert usage["reused_tokens"] == before
        before = usage["prompt_tokens"] + usage["new_tokens"] - 1  # the last token was not read


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (said("A fox", " ran.", "And"), "<bos>A fox ran. And"),
        (said("A fox", ". It ran. ", "And"), "<bos>A fox. It ran. And"),
        (said("A fox", " ran.", "\nAnd"), "<bos>A fox ran.\nAnd"),
        (said("A fox", "", "And"), "<bos>A fox And"),
        ([{"role": "system", "content": "A tale."}, *said("A fox")], "<bos>A tale. A fox"),
        ([*said("A fox"), {"role": "assistant", "content": None, "tool_calls": [1]}, *said("And")], "<bos>A fox And"),
    ],
)
def test_one_blank_stands_between_messages_that_have_none(messages: list[dict[str, Any]], text: str) -> None:
    assert render_chat_text(stories().tokenizer, messages) == text


def test_the_script_that_makes_the_checkpoints_has_their_templates() -> None:
    root = Path(package.__file__).parent
    script = (root.parent / "scripts" / "builtin_data" / "checkpoints.py").read_text(encoding="utf-8")
    values: dict[str, str] = {}
    exec(script[script.index("STORIES_CHAT") : script.index("\n\n\ndef ")], values)
    for name in ("stories", "numbers"):
        shipped = (root / "models" / "builtin" / name / "chat_template.jinja").read_text(encoding="utf-8")
        assert shipped == values[f"{name.upper()}_CHAT"]

"""Lines as commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from genctl.errors import UsageError
from genctl.tree.commands import COMMANDS, parse

DOCS = Path(__file__).resolve().parents[2] / "docs" / "explore.md"


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("left", {"n": 1}),
        ("  right 4  ", {"n": 4}),
        ("take 3", {"token": 3, "n": None}),
        ("take 3 0", {"token": 3, "n": 0}),
        ("take id:17 5", {"token": "id:17", "n": 5}),
        (r'take " a\"b" 2', {"token": ' a"b', "n": 2}),
        ("generate", {"n": None}),
        ("sample", {"k": 4, "n": None}),
        ("beams 2 9", {"k": 2, "n": 9}),
        ("edit  two words ", {"text": " two words "}),
        (r'edit "a\nb"', {"text": "a\nb"}),
        ("set top-p=0.5", {"key": "top_p", "value": 0.5}),
        ('set stop_strings=["a"]', {"key": "stop_strings", "value": ["a"]}),
        ("expand mass=0.9,depth=6", {"mass": 0.9, "depth": 6}),
        ("expand depth=2 nodes=5", {"mass": 1.0, "depth": 2, "nodes": 5}),
        ("goto 12", {"node": 12}),
        ("save a file.jsonl", {"name": "a file.jsonl"}),
    ],
)
def test_a_line_is_a_command_with_arguments(line: str, arguments: dict[str, object]) -> None:
    assert parse(line).arguments == arguments


@pytest.mark.parametrize("line", ["", "left 0", "left -1", "take", "take x", 'take "a', "take id:x", "edit", 'edit "a',
                                  "sample 1 2 3", "goto", "goto a", "goto -1", "undo now", "set", "set top_p",
                                  "set seed_=1", "expand", "save", "left 99999999999"])  # fmt: skip
def test_what_cannot_be_read_is_a_usage_error(line: str) -> None:
    with pytest.raises(UsageError):
        parse(line)


@pytest.mark.parametrize("name", ["next", "previous", "redo", "reset", "bookmark", "layers", "compare", "beside",
                                  "copy", "repeat"])  # fmt: skip
def test_a_command_that_was_removed_says_what_does_its_job(name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name} was removed: "):
        parse(f"{name} 1")


def test_every_command_is_done_and_documented() -> None:
    assert all(callable(command.function) for command in COMMANDS.values())
    rows = re.findall(r"^\| `(.+)` \| (.+) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    stated = {usage.replace("\\|", "|"): about for usage, about in rows}
    assert {command.usage: command.about for command in COMMANDS.values()}.items() <= stated.items()

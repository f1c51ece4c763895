"""A column whose name is that of a setting is reported once, with the row that would set it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from genctl.io.jsonl import ROW, SCORED_ROW, RowShape
from genctl.io.readers import Format, read
from genctl.io.template import parse


def remarks(data: bytes, format: Format = "jsonl", template: str | None = None, shape: RowShape = ROW) -> list[str]:
    said: list[str] = []
    made = None if template is None else parse(template)
    list(read(io.BytesIO(data), format=format, name="in", report=said.append, template=made, shape=shape))
    return said


def lines(*rows: dict[str, Any]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def warning(names: str, *knobs: str, where: str = "in, line 1") -> str:
    params = ", ".join(f'"{knob}": …' for knob in knobs)
    return (
        f"warning: {where}: read as columns of your own, not as settings: {names}; "
        f'settings of a row are written "params": {{{params}}}'
    )


@pytest.mark.parametrize(
    ("key", "knob"),
    [
        ("temperature", "temperature"), ("top-p", "top_p"), ("--top-k", "top_k"), ("Temperature", "temperature"),
        ("maxOutputTokens", "max_new_tokens"), ("max_tokens", "max_new_tokens"), ("stop", "stop_strings"),
        ("n", "num_return_sequences"), ("seed", "seed"),
    ],
)  # fmt: skip
def test_a_setting_beside_the_prompt_is_reported(key: str, knob: str) -> None:
    assert remarks(lines({"prompt": "hi", key: 1})) == [warning(key, knob)]


@pytest.mark.parametrize("key", ["label", "model", "device", "reference", "logprob", "batch_size", "score", "param_x"])
def test_other_columns_are_not(key: str) -> None:
    assert remarks(lines({"prompt": "hi", key: "x"})) == []


def test_all_settings_of_a_row_are_in_one_warning_and_each_is_reported_once() -> None:
    row = {"prompt": "hi", "temperature": 0.5, "label": 1, "top_p": 0.9}
    said = remarks(lines(row, row, {**row, "min_p": 0.1}))
    assert said == [
        warning("temperature, top_p", "temperature", "top_p"),
        warning("min_p", "min_p", where="in, line 3"),
    ]


def test_columns_of_tables_are_reported_too() -> None:
    table = b"prompt,temperature,max_tokens\nhi,0.5,8\nho,1,9\n"
    assert remarks(table, "csv") == [
        warning("temperature, max_tokens", "temperature", "max_new_tokens", where="in, row 1")
    ]


def test_a_column_that_a_template_uses_is_none() -> None:
    data = lines({"city": "Rome", "temperature": 20, "seed": 3})
    assert remarks(data, template="{city}: {temperature}") == [warning("seed", "seed")]


def test_records_and_texts_to_score_have_such_columns() -> None:
    assert remarks(lines({"schema": "genctl/1", "prompt": "hi", "seed": 3, "strategy": "beam"})) == []
    assert remarks(lines({"text": "hi", "temperature": 1}), shape=SCORED_ROW) == []


def test_a_key_one_edit_from_ours_is_a_warning_once() -> None:
    def misspelt(line: int, name: str, key: str) -> str:
        return f"warning: in, line {line}: {name!r} is read as a column of your own; is {key} meant?"

    rows: list[dict[str, Any]] = [
        {"prompt": "a", "label": 1},
        {"prompt": "a", "promt": 1, "message": []},
        {"prompt": "a", "promt": 1, "param": {}},
        {"promt": "a"},
    ]
    assert remarks(lines(*rows)) == [
        misspelt(2, "promt", "prompt"),
        misspelt(2, "message", "messages"),
        misspelt(3, "param", "params"),
    ]
    for name, key in (("prmopt", "prompt"), ("Prompt", "prompt"), ("ID", "id"), ("tool", "tools")):
        assert remarks(lines({"prompt": "a", name: 1})) == [misspelt(1, name, key)]
    for name in ("idx", "label", "input", "text", "prompting", "messag", "test", "param" * 10**5, ""):
        assert remarks(lines({"prompt": "a", name: 1})) == [], name

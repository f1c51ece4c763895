"""A column whose name is that of a setting is reported once, with the row that would set it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from genctl.io import scored
from genctl.io.jsonl import RowShape
from genctl.io.readers import Format, read
from genctl.io.template import parse


def remarks(
    data: bytes, format: Format = "jsonl", template: str | None = None, shape: RowShape | None = None
) -> list[str]:
    said: list[str] = []
    made = None if template is None else parse(template)
    list(read(io.BytesIO(data), format=format, name="in", report=said.append, template=made, shape=shape))
    return said


def lines(*rows: dict[str, Any]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def warning(names: str, params: str, where: str = "in, line 1") -> str:
    return (
        f"warning: {where}: read as columns of your own, not as settings: {names}; "
        f'settings of a row are written "params": {params}'
    )


@pytest.mark.parametrize(
    ("key", "value", "params"),
    [
        ("temperature", 0.5, '{"temperature": 0.5}'),
        ("top-p", 0.9, '{"top_p": 0.9}'),
        ("--top-k", 5, '{"top_k": 5}'),
        ("Temperature", 0, '{"temperature": 0}'),
        ("maxOutputTokens", 8, '{"max_new_tokens": 8}'),
        ("topP", 0.5, '{"top_p": 0.5}'),
        ("max_tokens", 5, '{"max_new_tokens": 5}'),
        ("max_output_tokens", 5, '{"max_new_tokens": 5}'),
        ("stop", ["a"], '{"stop_strings": ["a"]}'),
        ("n", 2, '{"num_return_sequences": 2}'),
        ("seed", 7, '{"seed": 7}'),
        ("num_beams", None, '{"num_beams": null}'),
        ("json_schema", {"type": "x" * 99}, '{"json_schema": …}'),
        ("stop_strings", "\x1b[2J", '{"stop_strings": "\\u001b[2J"}'),
    ],
)
def test_a_setting_beside_the_prompt_is_reported(key: str, value: Any, params: str) -> None:
    assert remarks(lines({"prompt": "hi", key: value})) == [warning(key, params)]


@pytest.mark.parametrize("key", ["label", "model", "device", "reference", "logprob", "batch_size", "score", "param_x"])
def test_other_columns_are_not(key: str) -> None:
    assert remarks(lines({"prompt": "hi", key: "x"})) == []


def test_all_settings_of_a_row_are_in_one_warning_and_each_is_reported_once() -> None:
    row = {"prompt": "hi", "temperature": 0.5, "label": 1, "top_p": 0.9}
    said = remarks(lines(row, row, {**row, "min_p": 0.1}))
    assert said == [
        warning("temperature, top_p", '{"temperature": 0.5, "top_p": 0.9}'),
        warning("min_p", '{"min_p": 0.1}', "in, line 3"),
    ]


@pytest.mark.parametrize(("format", "separator"), [("csv", ","), ("tsv", "\t")])
def test_columns_of_tables_are_reported_too(format: Format, separator: str) -> None:
    table = (
        f"prompt{separator}temperature{separator}max_tokens\nhi{separator}0.5{separator}8\nho{separator}1{separator}9\n"
    )
    expected = warning("temperature, max_tokens", '{"temperature": 0.5, "max_new_tokens": 8}', "in, row 1")
    assert remarks(table.encode(), format) == [expected]


def test_columns_of_parquet_are_reported_too(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"prompt": ["a", "b"], "top-p": [0.5, None]}), tmp_path / "t.parquet")
    said = remarks((tmp_path / "t.parquet").read_bytes(), "parquet")
    assert said == [warning("top-p", '{"top_p": 0.5}', "in, row 1")]


def test_a_column_that_a_template_uses_is_none() -> None:
    data = lines({"city": "Rome", "temperature": 20, "seed": 3})
    assert remarks(data, template="{city}: {temperature}") == [warning("seed", '{"seed": 3}')]


def test_records_and_texts_to_score_have_such_columns() -> None:
    assert remarks(lines({"schema": "genctl/1", "prompt": "hi", "seed": 3, "strategy": "beam"})) == []
    assert remarks(lines({"text": "hi", "temperature": 1}), shape=scored.ROW) == []

"""Tables as inputs: CSV, TSV and Parquet have the rows that JSONL has, or say with a row's number why not."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import itertools
import json
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from genctl.errors import InputError
from genctl.io import readers, template
from genctl.io.contents import Pipe
from genctl.io.jsonl import SCORED_ROW
from genctl.io.readers import Format, read
from genctl.io.rows import BadRow, InputRow

LINE: dict[str, Any] = {"id": "a", "prompt": 'One, "day"\nor two', "label": "x\ty", "empty": "", "é": "ü"}


def rows(data: bytes, format: Format = "csv", **how: Any) -> list[InputRow | BadRow]:
    return list(read(io.BytesIO(data), format=format, name="in", **how))


def messages(data: bytes, format: Format = "csv") -> list[str]:
    return [row.message if isinstance(row, BadRow) else f"={row.prompt}" for row in rows(data, format)]


def written(table: list[dict[str, Any]], dialect: str) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(table[0]), dialect=dialect)
    writer.writeheader()
    writer.writerows(table)
    return file.getvalue().encode("utf-8-sig")


def parquet(columns: dict[str, list[Any]], **how: Any) -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, **how)
    return file.getvalue()


def test_every_form_of_a_table_has_the_rows_of_jsonl() -> None:
    second = LINE | {"id": "b", "prompt": "x"}
    (expected, _) = rows((json.dumps(LINE) + "\n" + json.dumps(second)).encode(), "jsonl")
    assert isinstance(expected, InputRow)
    assert expected.columns == {"label": "x\ty", "empty": "", "é": "ü"}
    for format, data in (
        ("csv", written([LINE, second], "excel")),
        ("tsv", written([LINE, second], "excel-tab")),
        ("parquet", parquet({key: [value, second[key]] for key, value in LINE.items()})),
    ):
        first, other = rows(data, format)  # type: ignore[arg-type]
        assert isinstance(first, InputRow)
        assert (first.id, first.own_id, first.prompt) == ("a", True, LINE["prompt"])
        assert list(first.columns.items()) == list(expected.columns.items())
        assert (first.where, other.where, other.id) == ("in, row 1", "in, row 2", "b")


def test_cells_of_lists_and_objects_are_json_and_empty_ones_are_not_there() -> None:
    data = (
        "prompt,messages,prompt_ids,params,id,note\n"
        'hi,,,"{""top_k"": 3}",,\n'
        ',"[{""role"": ""user"", ""content"": ""x""}]",,,7,n\n'
        ',,"[4, 5]",,,\n'
        "hi,,,top_k=3,q,m\n"
        ",,4 5,,,\n"
        ",,,,,\n"
        "a,,[1],,,\n"
    )
    made = rows(data.encode())
    assert [(row.prompt, row.messages, row.prompt_ids, row.params) for row in made if isinstance(row, InputRow)] == [
        ("hi", None, None, {"top_k": 3}),
        (None, ({"role": "user", "content": "x"},), None, {}),
        (None, None, (4, 5), {}),
    ]
    assert [row.columns for row in made] == [{"note": text} for text in ("", "n", "", "m", "", "", "")]
    assert [row.id for row in made] == ["0", "7", "2", "q", "4", "5", "6"]
    assert [row.message for row in made if isinstance(row, BadRow)] == [
        "row 4: params: not JSON: expected a value at column 1",
        "row 5: prompt_ids: not JSON: text after the end of the value at column 3",
        "row 6: no prompt: expected one of prompt, prompt_ids, messages",
        "row 7: prompt and prompt_ids exclude each other",
    ]


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_text_serves_where_there_is_no_prompt(format: Format) -> None:
    both, alone = {"text": "a", "prompt": "b"}, {"text": "a", "n": "1"}
    for row, prompt, columns in ((both, "b", {"text": "a"}), (alone, "a", {"n": "1"})):
        data = {
            "jsonl": json.dumps(row).encode(),
            "csv": written([row], "excel"),
            "parquet": parquet({key: [value] for key, value in row.items()}),
        }[format]
        assert [(one.prompt, one.columns) for one in rows(data, format) if isinstance(one, InputRow)] == [
            (prompt, columns)
        ]


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"prompt,n\na,1\nb\nc,1,2\n\n\nd,4\n", ["=a", "row 2: 1 cell, but the header has 2",
                                                   "row 3: 3 cells, but the header has 2", "=d"]),
        (b'prompt,n\n"a"b,1\nc,2\n', ["row 1: not CSV: ',' expected after '\"'", "=c"]),
        (b'prompt,n\na,"1\n', ["row 1: not CSV: unexpected end of data"]),
        (b"prompt,n\r\na,1\r\nb,\xe9\r\nc,\xc3\xa9\r\n", ["=a", "row 2: not UTF-8: byte 0xe9", "=c"]),
        (b'prompt\n"a\rb\xe2\x80\xa8c"\n', ["=a\rb\u2028c"]),
        (b"prompt,n\n", []),
        (b"", []),
        (b'prompt\n"a\n\nb"\n', ["=a\n\nb"]),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_and_costs_no_other(data: bytes, wanted: list[str]) -> None:
    assert messages(data) == wanted


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"a,b,a\n1,2,3\n", "in: two columns are called 'a'"),
        (b"prompt,,\na,2,3\n", "in: two columns have no name"),
        (b"caf\xe9,prompt\n", "in, the header: not UTF-8: byte 0xe9"),
        (b"\xff\xfep\x00\n", "in, the header: not UTF-8: byte 0xff"),
        (b"question,promt\n1,2\n", "in: no column with a prompt: expected one of prompt, prompt_ids, messages, text "
                                    "(is 'promt' meant as prompt?)"),
        (b"prompt\nx\n" + b"y" * 200, "in: line 3 has 200 bytes, more than the limit of 99"),
        (b'prompt\nx\n"' + b"y\n" * 200, "in, line 3: a cell has more than 99 characters: is a quote not closed?"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_one_ends_the_run_with_one_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        rows(data, limit=99)
    assert caught.value.message == f"cannot read {sentence}"


def test_a_header_of_a_hundred_thousand_columns_is_read() -> None:
    names = [f"column{number}" for number in range(100_000)]
    (row,) = rows(f"prompt,{','.join(names)}\na,{','.join(names)}\n".encode())
    assert list(row.columns) == names, "in the order of the header"
    with pytest.raises(InputError, match="two columns are called 'column7'"):
        rows(f"prompt,{','.join(names)},column7\n".encode())


def test_one_column_may_have_no_name() -> None:
    (row,) = rows(b",prompt\n0,a\n")
    assert row.columns == {"": "0"}


def test_a_template_that_names_no_column_is_one_error() -> None:
    with pytest.raises(InputError, match=r"no field 'questoin' \(did you mean question\?\)"):
        rows(b"question,n\na,1\n", template=template.parse("{questoin}"))
    made = rows(b"q,prompt,messages,system\na,1,,\nb,,,s\nc,,[],\n", template=template.parse("{q}: {prompt}{system}"))
    assert [(row.prompt, row.extra) if isinstance(row, InputRow) else row.message for row in made] == [
        ("a: 1", {}),
        ("b: s", {"system": "s"}),
        "row 3: template: it makes a prompt, but the row has messages",
    ]
    assert made[0].columns == {"q": "a", "prompt": "1", "messages": ""}


def test_a_template_reads_a_record_before_the_columns_of_its_row() -> None:
    record = {"schema": "genctl/1", "prompt": "new", "text": "t", "input": {"prompt": "old", "label": "x"}}
    (row,) = rows(json.dumps(record).encode(), "jsonl", template=template.parse("{prompt} {text} {label}"))
    assert row.prompt == "new t x"


def test_an_id_is_used_once_and_the_row_before_it_named() -> None:
    assert messages(b"id,prompt\nx,a\ny,b\nx,c\n") == ["=a", "=b", "row 3: the id 'x' is already used in row 1"]


def test_values_of_parquet_become_those_of_json() -> None:
    data = parquet(
        {
            "id": [1, 2],
            "messages": [[{"role": "user", "content": "a", "name": None}], None],
            "text": [None, "b"],
            "params": [None, {"top_k": 3, "top_p": None}],
            "f": [1.5, float("nan")],
            "when": [datetime.date(2026, 1, 2), None],
            "price": [decimal.Decimal("1.50")] * 2,
            "b": [b"ab", b"\xff"],
            "list": [[1, None], []],
        }
    )
    one, two = rows(data, "parquet")
    assert isinstance(one, InputRow)
    assert isinstance(two, InputRow)
    assert (one.id, one.messages, one.prompt) == ("1", ({"role": "user", "content": "a"},), None)
    assert (two.id, two.messages, two.prompt, two.params) == ("2", None, "b", {"top_k": 3})
    assert one.columns == {"text": None, "f": 1.5, "when": "2026-01-02", "price": "1.50", "b": "ab", "list": [1, None]}
    assert two.columns == {"f": None, "when": None, "price": "1.50", "b": "/w==", "list": []}


def test_two_columns_of_parquet_with_one_name_are_refused() -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"]), file)
    with pytest.raises(InputError, match="in: two columns are called 'prompt'"):
        rows(file.getvalue(), "parquet")


@pytest.mark.parametrize("kind", ["date32", "timestamp", "duration", "text", "list", "time zone"])
def test_a_value_that_python_does_not_have_is_the_error_of_its_row(kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    far = {
        "date32": lambda: pa.array([0, 2**30, 1], pa.int32()).cast(pa.date32()),
        "timestamp": lambda: pa.array([0, 2**62, 1], pa.int64()).cast(pa.timestamp("ms")),
        "duration": lambda: pa.array([0, 2**62, 1], pa.int64()).cast(pa.duration("s")),
        "text": lambda: pa.array([b"a", b"\xff", b"b"]).view(pa.string()),
        "time zone": lambda: pa.array([None, 1, None], pa.timestamp("us", tz="Mars/Olympus")),
        "list": lambda: pa.ListArray.from_arrays([0, 1, 2, 3], far["date32"]()),
    }
    first, bad, last = rows(parquet({"prompt": ["a", "b", "c"], "when": far[kind]()}), "parquet")
    assert isinstance(first, InputRow)
    assert isinstance(last, InputRow)
    assert isinstance(bad, BadRow)
    assert bad.message.startswith("row 2: ")


def test_a_row_of_parquet_that_is_too_large_is_refused_alone() -> None:
    data = parquet({"prompt": ["a", "b" * 2000, "c"]})
    first, large, last = rows(data, "parquet", limit=1000)
    assert (first.id, last.id) == ("0", "2")
    assert isinstance(large, BadRow)
    assert re.fullmatch(r"row 2: \d+ bytes are more than the limit of 1000", large.message)


def test_what_is_no_parquet_file_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="in: not Parquet: "):
        rows(b"prompt\nx\n", "parquet")
    with pytest.raises(InputError, match="not read from a pipe") as piped:
        list(read(Pipe(io.BytesIO(b"x")), format="parquet", name="stdin"))
    assert piped.value.hint == "--input FILE reads a file"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="needs pyarrow") as caught:
        rows(b"", "parquet")
    assert caught.value.hint == 'pip install "genctl[parquet]"'


class Endless(io.BytesIO):
    """A header and the same rows for ever."""

    asked = 0

    def read1(self, size: int | None = -1, /) -> bytes:
        self.asked += 1
        return b"prompt,n\n" if self.asked == 1 else b"once,1\n" * 100


def test_rows_of_csv_come_before_the_input_ends_and_memory_does_not_grow() -> None:
    source = Endless()
    taken = itertools.islice(read(source, format="csv", name="in"), 20_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in taken) == 20_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert source.asked == 201
    assert peak < 200_000  # bytes; the rows have 140 000 as text, and ten times that as objects


@pytest.mark.parametrize("format", ["csv", "tsv", "parquet"])
def test_a_file_is_known_by_its_name(format: Format, tmp_path: Path) -> None:
    table = [LINE, LINE | {"id": "b"}, LINE | {"id": "c"}]
    data = {
        "csv": written(table, "excel"),
        "tsv": written(table, "excel-tab"),
        "parquet": parquet({key: [row[key] for row in table] for key in LINE}),
    }[format]
    path = tmp_path / f"A.{format.upper()}"
    path.write_bytes(data)
    assert readers.format_of(None, str(path)) == format
    assert len(list(read(io.BytesIO(data), name=str(path)))) == 3


def test_a_row_to_be_scored_keeps_its_columns_and_its_candidates_are_json() -> None:
    made = rows(b'text,context,candidates,n\na,b,,1\n,,"[""x""]",2\n', shape=SCORED_ROW)
    assert [(row.prompt, row.extra, row.columns) for row in made if isinstance(row, InputRow)] == [
        ("a", {"context": "b"}, {"n": "1"}),
        (None, {"candidates": ("x",)}, {"n": "2"}),
    ]

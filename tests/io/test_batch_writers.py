"""Records out: every format holds any text, every record arrives whole, and each failure is one sentence."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.errors import OutputError
from genctl.io.output import Sink
from genctl.io.records import error_record
from genctl.io.writers import COLUMNS, Format, open_output, open_writer, to_json

FORMATS: tuple[Format, ...] = ("text", "json", "jsonl", "tsv")


def sample(id: str = "0", text: str = "a b", **more: object) -> dict[str, Any]:
    usage = {"prompt_tokens": 1, "new_tokens": 2}
    return {"schema": "genctl/1", "id": id, "sequence": 0, "prompt": "p", "text": text, "finish_reason": "eos"} | {
        "logprob": -0.1,
        "score": -0.05,
        "usage": usage,
        **more,
    }


def refuse(record: Mapping[str, Any]) -> None:
    raise AssertionError(record)


def encode(
    format: Format, records: Sequence[Mapping[str, Any]], errors: list[Mapping[str, Any]] | None = None
) -> bytes:
    target = io.BytesIO()
    writer = open_writer(format, Sink(target, "out"), on_error=refuse if errors is None else errors.append)
    for record in records:
        writer.write(record)
    writer.close()
    return target.getvalue()


def write_all(sink: Sink, lines: Sequence[str]) -> None:
    for line in lines:
        sink.write(line.encode())


def test_text_is_verbatim_and_errors_go_elsewhere() -> None:
    errors: list[Mapping[str, Any]] = []
    bad = error_record("1", "input", "line 2: no")
    assert (
        encode("text", [sample(text="a\tb\n\x1b[1m"), bad, sample(text="é\udc80")], errors)
        == b"a\tb\n\x1b[1m\n\xc3\xa9\\udc80\n"
    )
    assert errors == [bad]


@pytest.mark.parametrize("format", ["json", "jsonl", "tsv"])
def test_errors_have_a_place_in_every_format_but_text(format: Format) -> None:
    assert b"line 2: no" in encode(format, [error_record("1", "input", "line 2: no")])


def test_json_is_an_array_of_one_record_per_line() -> None:
    assert encode("json", []) == b"[]\n"
    assert encode("json", [{"a": 1}]) == b'[\n{"a": 1}\n]\n'
    assert encode("json", [{"a": 1}, {"b": "é"}]) == '[\n{"a": 1},\n{"b": "é"}\n]\n'.encode()


def test_jsonl_escapes_what_could_be_taken_for_something_else() -> None:
    assert to_json({"a": "é\u2028\x9b\u202e\udc80\n"}) == '{"a": "é\\u2028\\u009b\\u202e\\udc80\\n"}'
    with pytest.raises(ValueError, match="Out of range"):
        to_json({"a": float("nan")})


def test_tsv_has_a_header_and_escaped_cells() -> None:
    header = "\t".join(COLUMNS) + "\n"
    assert encode("tsv", []).decode() == header
    assert encode(
        "tsv", [sample(text="a\tb\r\n\\t\x1b\x85\u2028\u202eé"), error_record("7", "input", "no\tgo")]
    ).decode() == (
        header
        + "0\t0\teos\t-0.1\t-0.05\t2\ta\\tb\\r\\n\\\\t\\x1b\\x85\\u2028\\u202eé\tp\t\n"
        + "7\t\t\t\t\t\t\t\tinput: no\\tgo\n"
    )


def unescape(cell: str) -> str:
    names = {"t": "\t", "n": "\n", "r": "\r", "\\": "\\"}
    pattern = r"\\(?:([tnr\\])|x([0-9a-f]{2})|u([0-9a-f]{4}))"
    return re.sub(pattern, lambda found: names[found[1]] if found[1] else chr(int(found[2] or found[3], 16)), cell)


anything = st.text(st.characters(), max_size=30) | st.text("\\tnrx0\t\n\r\x85\u2028\x1b\x00", max_size=12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(anything, anything, anything), max_size=4))
def test_tsv_keeps_its_columns_under_any_text(texts: list[tuple[str, str, str]]) -> None:
    records = [sample(id, text, prompt=prompt) for id, text, prompt in texts]
    errors = [error_record(id, "input", text) for id, text, _ in texts]
    written = encode("tsv", [*records, *errors]).decode()
    lines = written.splitlines()
    assert len(lines) == 1 + 2 * len(texts)
    assert written.count("\n") == len(lines)
    cells = [line.split("\t") for line in lines]
    assert {len(row) for row in cells} == {len(COLUMNS)}
    assert [(unescape(row[0]), unescape(row[6]), unescape(row[7])) for row in cells[1 : 1 + len(texts)]] == texts
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", written)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | anything,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(anything, inner, max_size=3),
    max_leaves=8,
)


def joined(value: Any) -> Any:
    """Two halves of a surrogate pair in a row are one character to every JSON reader."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, dict):
        return {joined(key): joined(item) for key, item in value.items()}
    return [joined(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(anything, values, max_size=4), max_size=4))
def test_json_and_jsonl_read_back_as_they_were(records: list[dict[str, Any]]) -> None:
    lines = encode("jsonl", records).decode()
    assert len(lines.splitlines()) == lines.count("\n") == len(records)
    assert [json.loads(line) for line in lines.splitlines()] == [joined(record) for record in records]
    assert json.loads(encode("json", records)) == [joined(record) for record in records]


@pytest.mark.parametrize("format", FORMATS)
def test_each_record_is_one_write_of_whole_lines(format: Format) -> None:
    calls: list[bytes] = []

    class Counting(io.RawIOBase):
        def write(self, data: Any, /) -> int:
            calls.append(bytes(data))
            return len(data)

    writer = open_writer(format, Sink(Counting(), "out"), on_error=refuse)
    for number in range(3):
        writer.write(sample(text=f"text {number}"))
        assert len(calls) == number + 1
        assert f"text {number}".encode() in calls[-1]
    writer.close()
    assert b"".join(calls) == encode(format, [sample(text=f"text {number}") for number in range(3)])
    if format != "json":  # an array's lines end with the comma that is only known with the next record
        assert all(call.endswith(b"\n") for call in calls)


class Faulty(io.BytesIO):
    """Takes a few bytes at a time; each step of the plan is how many, or what goes wrong."""

    def __init__(self, plan: Sequence[int | BaseException]) -> None:
        super().__init__()
        self.plan = list(plan)

    def write(self, data: Any, /) -> int:
        step = self.plan.pop(0) if self.plan else len(data)
        if isinstance(step, BaseException):
            raise step
        return super().write(bytes(data[:step]))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 9) | st.just(InterruptedError(4, "Interrupted system call")), max_size=60),
    st.sampled_from(FORMATS),
)
def test_short_and_interrupted_writes_lose_nothing(plan: list[int | BaseException], format: Format) -> None:
    target = Faulty(plan)
    writer = open_writer(format, Sink(target, "out"), on_error=refuse)
    records = [sample(str(number), "tëxt") for number in range(3)]
    for record in records:
        writer.write(record)
    writer.close()
    assert target.getvalue() == encode(format, records)


@pytest.mark.parametrize("after", range(12))
def test_a_record_that_a_signal_breaks_into_is_finished_at_close(after: int) -> None:
    target = Faulty([3] * after + [KeyboardInterrupt()])
    sink = Sink(target, "out")
    with pytest.raises(KeyboardInterrupt):
        write_all(sink, [f"{number:09}\n" for number in range(12)])
    sink.close()
    lines = target.getvalue().splitlines(keepends=True)
    assert lines == [f"{number:09}\n".encode() for number in range(after // 4 + 1)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EIO, "I/O"), "I/O"),
        (0, "Input/output error"),
    ],
)
def test_a_failed_write_is_one_sentence_and_stays_failed(error: int | BaseException, reason: str) -> None:
    writer = open_writer("json", Sink(Faulty([5, error]), "out.json"), on_error=refuse)
    for attempt in (partial(writer.write, sample()), partial(writer.write, sample()), writer.close):
        with pytest.raises(OutputError, match=rf"^the output could not be written: {reason}.* \(out.json\)$"):
            attempt()


def test_a_broken_pipe_is_not_an_output_error() -> None:
    writer = open_writer("tsv", Sink(Faulty([4, BrokenPipeError(32, "Broken pipe")]), "stdout"), on_error=refuse)
    with pytest.raises(BrokenPipeError):
        writer.write(sample())
    with pytest.raises(BrokenPipeError):
        writer.write(sample())
    writer.close()


def test_a_real_full_device_is_one_sentence() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    sink = open_output("/dev/full", io.BytesIO(), force=False)
    with pytest.raises(OutputError, match=r"^the output could not be written: No space left on device \(/dev/full\)$"):
        sink.write(b"x\n")
    sink.close()


def test_a_non_blocking_pipe_gets_everything() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    data = b"x" * 500_000 + b"\n"
    found = []

    def collect() -> None:
        with os.fdopen(reader, "rb") as stream:
            found.append(stream.read())

    thread = threading.Thread(target=collect)
    with os.fdopen(writer, "wb") as stream:
        sink = open_output(None, stream)
        thread.start()
        sink.write(data)
        sink.close()
    thread.join()
    assert found == [data]


def test_output_is_utf8_in_any_locale() -> None:
    code = (
        "import sys; from genctl.io.writers import open_output, open_writer\n"
        "writer = open_writer('text', open_output(None, sys.stdout), on_error=print)\n"
        "print('first'); writer.write({'text': '\\xe9\\u20ac'}); writer.close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert sorted(done.stdout.splitlines()) == [b"first", "é€".encode()]

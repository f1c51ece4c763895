"""A file looked over: as many rows as the reader will find, and a digest of every byte."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.io import readers
from genctl.io.readers import scan

BYTES = st.lists(st.sampled_from([b"\n", b"\r\n", b"\0", b" ", b"\t", b"a", b"{}", b"\xff"]), max_size=12).map(b"".join)


@settings(max_examples=300, deadline=None)
@given(BYTES, st.sampled_from(["lines", "jsonl", "text"]))
def test_as_many_rows_as_the_reader_finds(tmp_path_factory: pytest.TempPathFactory, data: bytes, kind: str) -> None:
    path = tmp_path_factory.getbasetemp() / "looked"
    path.write_bytes(data)
    looked = scan(path, kind)
    assert looked is not None
    found = list(readers.read(io.BytesIO(data), format=kind, name="x"))  # type: ignore[arg-type]
    if kind != "lines" or b"\r" not in data:  # a lone CR at the end may be counted or not
        assert looked.rows == len(found)
    assert looked.bytes == len(data)


def test_pieces_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(b"one\n\ntwo\nthree\n\n\n")
    whole = scan(path, "lines")
    for size in (1, 2, 3, 5):
        monkeypatch.setattr(readers, "SCANNED", size)
        assert scan(path, "lines") == whole
    assert whole is not None
    assert whole.rows == 4
    path.write_bytes(b"one\n\ntwo\nthrEe\n\n\n")
    again = scan(path, "lines")
    assert again is not None
    assert again.identity() != whole.identity()


def test_what_can_be_read_only_once_is_left_alone(tmp_path: Path) -> None:
    assert scan(tmp_path / "missing", "lines") is None
    assert scan("/dev/null", "lines") is None
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert scan(pipe, "lines") is None

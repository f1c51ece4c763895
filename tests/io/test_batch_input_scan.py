"""How many rows a progress bar counts to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from genctl.io import readers
from genctl.io.readers import count_rows


@pytest.mark.parametrize(("content", "rows"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\n\nb", 3), (b"a\r\nb\r\n", 2)])
def test_the_lines_of_a_file_are_counted(
    tmp_path: Path, content: bytes, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "SCANNED", 2)
    path = tmp_path / "rows.txt"
    path.write_bytes(content)
    assert count_rows(path, "lines") == count_rows(path, "jsonl") == rows
    assert count_rows(path, "csv") is None


def test_what_can_be_read_only_once_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "missing", "/dev/null", tmp_path / "pipe"):
        assert count_rows(name, "lines") is None

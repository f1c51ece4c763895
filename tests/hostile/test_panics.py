"""A tokenizer that makes its library panic: one line on standard error, and nothing of the library's report."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from genctl.models import libraries
from tests.warm import python

PANICS: dict[str, dict[str, Any]] = {
    "while it is read": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\x01").decode()}
    },
    "while it reads": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(struct.pack("<I", 8) + b"\xff" * 8 + b"abc").decode(),
        }
    },
    "while it cuts": {
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5},
        "pre_tokenizer": {"type": "FixedLength", "length": 0},
    },
}


@pytest.mark.parametrize("name", PANICS)
def test_one_line_and_no_report(name: str, gpt2: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(gpt2, tmp_path / "gpt2"))
    told = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps({**told, **PANICS[name]}), encoding="utf-8")
    done = subprocess.run(
        [*python(), "-m", "genctl", "run", "the cat", "-m", str(folder), "-n", "2"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RUST_BACKTRACE": "1"},
    )
    assert done.returncode in (1, 3), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "panicked" not in line


def test_what_others_write_meanwhile_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    def failing() -> None:
        with libraries.without_panic_reports():
            os.write(2, b"before\n\nthread '<unnamed>' (7) panicked at lib.rs:1:2:\nindex out of bounds\nbacktrace:\n")
            raise ValueError("ours")

    with libraries.without_panic_reports(), libraries.without_panic_reports():
        writer = threading.Thread(target=lambda: os.write(2, b"a bar of another thread\n"))
        writer.start()
        writer.join()
    with pytest.raises(ValueError, match="ours"):
        failing()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "a bar of another thread\nbefore\nafter\n"


def test_a_closed_standard_error_is_no_obstacle() -> None:
    code = "from genctl.models import libraries\nwith libraries.without_panic_reports(): print('fine')"
    done = subprocess.run(["sh", "-c", f'{sys.executable} -c "{code}" 2>&-'], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"fine\n")

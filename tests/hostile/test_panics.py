"""A tokenizer that makes its library panic is refused in one line, behind the library's own report."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

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
def test_a_panic_is_an_error_of_one_line(name: str, gpt2: Path, tmp_path: Path) -> None:
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
    assert "Traceback" not in done.stderr
    *_, line = done.stderr.splitlines()
    assert line.startswith("error: ")

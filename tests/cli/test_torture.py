"""The crash harness, in short; `scripts/torture.py --kills 200` is the whole of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked")
def test_kills_and_write_faults_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "torture.py"), "--kills", "6", "--faults", "9", "--rows", "14"]
    command += ["--others", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run([*command, "--seconds", "300"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kills, faults, others, *_ = done.stdout.splitlines()
    assert kills.startswith("kills 6 of 6 (")
    assert kills.endswith(": lost 0, repeated 0, different 0, out of order 0, ended wrongly 0")
    assert (
        faults
        == "write faults 9 of 9 (ENOSPC, EIO, short): lost 0, repeated 0, different 0, out of order 0, ended wrongly 0"
    )
    assert (
        others == "others 5 of 5 (1 interrupted, 1 second run, 1 taken away, 1 tampered, 1 torn journal): "
        "lost 0, repeated 0, different 0, out of order 0, ended wrongly 0"
    )

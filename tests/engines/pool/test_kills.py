"""Workers and drivers that are killed: nothing is lost, nothing is repeated, nothing is different."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cli.tool import genctl

ROOT = Path(__file__).parents[3]
MODEL = "builtin:stories"
SETTINGS = ("-n", "24", "--do-sample", "--seed", "3", "--batch-size", "1")
PATIENCE = 120  # seconds

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


class Harness:
    """A job in a folder: its prompts, its expected output, and drivers for it."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.prompts, self.out = folder / "prompts.txt", folder / "out.jsonl"
        self.journal = folder / "out.jsonl.journal"
        self.prompts.write_text("".join(f"Once upon a time {number}\n" for number in range(rows)))
        expected = folder / "expected.jsonl"
        assert genctl("run", "-m", MODEL, *SETTINGS, "-i", str(self.prompts), "-o", str(expected)).status == 0
        self.expected = expected.read_bytes()

    @contextmanager
    def driver(self, workers: int) -> Iterator[subprocess.Popen[bytes]]:
        """A separate process that resumes the job."""
        command = [sys.executable, "-m", "genctl", "run", "-m", MODEL, *SETTINGS, "-i", str(self.prompts)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*command, "-o", str(self.out), "--resume", "--workers", str(workers)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    @property
    def rows(self) -> int:
        """The number of written rows, by the journal."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(json.loads(self.journal.read_text().splitlines()[-1]).get("rows", 0))
        return 0

    def wait_for(self, rows: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until so many rows are written."""
        until = time.monotonic() + PATIENCE
        while self.rows < rows and process.poll() is None:
            assert time.monotonic() < until, f"{self.rows} rows"
            time.sleep(0.05)

    def finish(self, workers: int) -> tuple[int, bytes, bytes]:
        """Resume the job and wait until it is done."""
        with self.driver(workers) as process:
            out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes that decode for a driver."""
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found += [child] if any("ray::Worker" in word for word in child.cmdline()) else []
    return found


@pytest.mark.night
def test_a_killed_worker_and_ctrl_c_cost_nothing(tmp_path: Path) -> None:
    job = Harness(tmp_path, 200)
    with job.driver(2) as process:
        job.wait_for(4, process)
        victims = workers_of(process)
        assert len(victims) == 2
        everything = psutil.Process(process.pid).children(recursive=True)
        victims[0].kill()
        job.wait_for(12, process)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=PATIENCE)
        seconds = time.monotonic() - began
    written = job.out.read_bytes()
    assert process.returncode == 130, err
    assert seconds < 3
    assert out == b""
    assert err.endswith(b"; rerun the same command to continue\ninterrupted\n"), err
    assert err.count(b"\n") == 2, err
    assert job.expected.startswith(written)
    assert 0 < len(written) < len(job.expected)
    assert job.finish(1) == (0, b"", b"")
    assert job.out.read_bytes() == job.expected
    _, alive = psutil.wait_procs(everything, timeout=20)
    assert len(everything) >= 6  # two daemons, two agents, two workers
    assert not alive
    assert not list(Path(tempfile.gettempdir()).glob(f"ray*/**/session_*_{process.pid}"))

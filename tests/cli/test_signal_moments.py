"""A signal at any moment of a run: the usual status and message, and --resume continues to the same bytes.

Moments are spread over the duration of an uninterrupted run: imports, loading, decoding, closing.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.engines.ranks.processes import free_port
from tests.engines.server.stand_in import Failure, running
from tests.tiny import checkpoint

ROOT = Path(__file__).parents[2]
SECONDS = 120  # for one run on a busy machine
NUMBERS = (signal.SIGINT, signal.SIGTERM)
WAYS = ("alone", "workers", "ranks", "server")


class Run:
    """One run, of one process or of several ranks."""

    def __init__(self, way: str, words: list[str], folder: Path) -> None:
        self.ranks = 2 if way == "ranks" else 1
        port, self.started = free_port(), []
        for rank in range(self.ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            environment = {
                **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(folder),
                "HF_HUB_OFFLINE": "1", **({**place, "MASTER_PORT": port} if self.ranks > 1 else {}),
            }  # fmt: skip
            self.started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "genctl", "run", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    cwd=folder,
                    start_new_session=True,
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                )
            )

    def send(self, number: int) -> list[psutil.Process]:
        """Send a signal to all processes of the run, as a terminal and `timeout` do. Returns those below the ranks."""
        below = []
        for process in self.started:
            if process.poll() is None:
                below += psutil.Process(process.pid).children(recursive=True)
                os.killpg(process.pid, number)
        return below

    def end(self) -> tuple[int, str]:
        """The status and the standard error of rank 0."""
        ends = [process.communicate(timeout=SECONDS) for process in self.started]
        return self.started[0].returncode, ends[0][1].decode()

    def kill(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@contextmanager
def job(way: str, folder: Path, rows: int) -> Iterator[list[str]]:
    """The command line of a run that takes a while."""
    prompts = folder / "rows.txt"
    prompts.write_text("".join(f"the cat {number}\n" for number in range(rows)))
    words = ["-i", str(prompts), "--format", "jsonl", "--seed", "3", "-o", str(folder / "out.jsonl")]
    if way == "alone":
        yield [*words, "-n", "24", "--batch-size", "1", "--do-sample", "--resume"]
    elif way == "workers":
        if importlib.util.find_spec("ray") is None:
            pytest.skip("Ray is not installed")
        yield [*words, "-n", "24", "--batch-size", "1", "--do-sample", "--resume", "--workers", "2"]
    elif way == "ranks":
        model = checkpoint("llama", folder / "llama")
        yield [*words, "-m", str(model), "-n", "24", "--batch-size", "1", "--tensor-parallel", "--force"]
    else:
        with running(fault=lambda server, body: Failure(slow_s=0.02)) as server:
            yield [*words, "--backend", server.url, "-n", "6", "--batch-size", "2", "--force"]


def finished(way: str, words: list[str], folder: Path) -> tuple[bytes, float]:
    """The output and the duration of a run, which resumes an interrupted output if it can."""
    run, began = Run(way, words, folder), time.monotonic()
    try:
        status, err = run.end()
    finally:
        run.kill()
    assert status == 0, err
    return (folder / "out.jsonl").read_bytes(), time.monotonic() - began


def interrupt_at(way: str, moments: int, folder: Path, rows: int = 24) -> None:
    (folder / "llama").mkdir()
    with job(way, folder, rows) as words:
        expected, seconds = finished(way, words, folder)
        for number in NUMBERS:
            for moment in range(moments):
                for path in folder.glob("out.jsonl*"):
                    path.unlink()
                run = Run(way, words, folder)
                try:
                    time.sleep(seconds * (moment + 0.5) / moments)
                    below = run.send(number)
                    status, err = run.end()
                finally:
                    run.kill()
                where = f"{number.name} at {moment} of {moments}: {err}"
                assert status in (128 + number, 0), where  # it may have been faster this time
                assert "Traceback" not in err, where
                assert "this is a bug" not in err, where
                assert err.count("interrupted\n") == (status == 130), where
                assert "error" not in err, where
                assert not psutil.wait_procs(below, timeout=30)[1], where
        assert finished(way, words, folder)[0] == expected


@pytest.mark.night
@pytest.mark.parametrize("way", WAYS)
def test_a_signal_at_twenty_moments_of_a_run(tmp_path: Path, way: str) -> None:
    """Ten moments, with SIGINT and with SIGTERM."""
    interrupt_at(way, 10, tmp_path)

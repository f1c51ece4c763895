"""Ranks that are stopped, launchers that are killed: the other ranks end by themselves, with an error message."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.engines.ranks.processes import ROOT, SECONDS, answer, environment, ranks
from tests.tiny import checkpoint

TIMEOUT = 6  # seconds instead of 120


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoint("llama", tmp_path_factory.mktemp("llama"))
    (folder / "many.txt").write_text("the cat\n" * 400)
    return folder


@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.night)])
def test_a_stopped_rank_ends_the_other_after_the_time_limit(llama: Path, stopped: int) -> None:
    """Rank 0 sometimes waits for a row: that must not count as not answering."""
    job = ("run", "-m", str(llama), "--tensor-parallel", "-n", "4", "--batch-size", "1", "--format", "jsonl", "-i", "-")
    with ranks("-m", "tests.engines.ranks.impatient", str(TIMEOUT), *job, stdin=subprocess.PIPE) as started:
        first = started[0]
        assert first.stdin is not None
        for wait in (0.0, 1.5 * TIMEOUT):
            time.sleep(wait)
            assert answer(first, "the cat")["prompt"] == "the cat"
            assert answer(first, "the dog")["prompt"] == "the dog"
        started[stopped].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        other = started[1 - stopped]
        if other is first:
            first.stdin.write("once\ntwice\n")
            first.stdin.flush()
        assert other.wait(timeout=SECONDS) == 3
        assert time.monotonic() - began > TIMEOUT / 2
        if other is first:
            assert first.stderr is not None
            said = first.stderr.read()
            assert f"another rank has ended or does not answer within {TIMEOUT} s" in said
            assert "Traceback" not in said


def test_ranks_end_with_their_launcher(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    job = ["run", "-m", str(llama), "-i", str(llama / "many.txt"), "-n", "200", "--batch-size", "1"]
    job += ["--tensor-parallel", "-o", str(out)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "genctl"]
    with (tmp_path / "said").open("wb") as said:
        launcher = subprocess.Popen(
            [*command, *job], env=environment(), cwd=ROOT, stderr=said, stdin=subprocess.DEVNULL
        )
        below: list[psutil.Process] = []
        try:
            until = time.monotonic() + SECONDS
            while not (out.exists() and out.stat().st_size):
                assert launcher.poll() is None
                assert time.monotonic() < until
                time.sleep(0.1)
            below = psutil.Process(launcher.pid).children(recursive=True)
            launcher.kill()
            assert len(below) >= 2
            assert not psutil.wait_procs(below, timeout=30)[1]
        finally:
            launcher.kill()
            launcher.wait()
            for process in below:
                if process.is_running():
                    process.kill()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert 0 < len(records) < 400

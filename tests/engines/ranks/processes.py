"""Start several ranks of the program as `torchrun` would, and wait for all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 90  # limit for a test's processes, which end by themselves within a few


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@contextmanager
def ranks(
    *command: str, size: int = 2, python: Sequence[str] = (sys.executable,), **how: Any
) -> Iterator[list[subprocess.Popen[str]]]:
    """`size` processes of `python COMMAND`, all of which are ended afterwards."""
    started, port = [], free_port()
    for rank in range(size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        started.append(
            subprocess.Popen(
                [*python, *command],
                env=environment(**place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                **{"stdin": subprocess.DEVNULL, **how},
            )
        )
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def answer(process: subprocess.Popen[str], prompt: str) -> Any:
    """The record of a prompt that rank 0 reads from standard input."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{prompt}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def run(*arguments: str, size: int = 2) -> list[tuple[int, str, str]]:
    """Run `genctl ARGUMENTS` on several ranks to the end: status, standard output and standard error of each."""
    with ranks("-m", "genctl", *arguments, size=size, python=warm.python()) as started:
        ends = [process.communicate(timeout=SECONDS) for process in started]
        return [(process.returncode, *end) for process, end in zip(started, ends, strict=True)]


def alone(command: Sequence[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """One process, without other ranks."""
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False, cwd=cwd
    )

"""What libraries log while a model runs is for --verbose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import checkpoint
from tests.warm import python

ROOT = Path(__file__).parents[2]
# a library that speaks up as the model is loaded, in each way in which one can
LOUD = (
    "import logging, warnings; from genctl.commands import job; load = job.Job.load_engine\n"
    "def loud(*given, **named):\n"
    "    logging.getLogger('transformers.models.any').warning('a fast path is missing')\n"
    "    logging.getLogger('another.library').error('a kernel is missing')\n"
    "    warnings.warn('something will change')\n"
    "    return load(*given, **named)\n"
    "job.Job.load_engine = loud\n"
    "from genctl.__main__ import main; main()\n"
)
SAID = (b"a fast path is missing", b"a kernel is missing", b"something will change")


def err_of(tmp_path: Path, program: list[str], *arguments: str) -> bytes:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path)}
    command = [*program, *arguments]
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True, timeout=120).stderr


@pytest.mark.parametrize("command", [("run",), ("compare", "-p", "greedy", "-p", "beam5")])
def test_no_library_speaks_but_with_verbose(tmp_path: Path, command: tuple[str, ...]) -> None:
    arguments = ("-c", LOUD, *command, "-m", "builtin:numbers", "12")
    assert err_of(tmp_path, python(), *arguments) == b""
    loud = err_of(tmp_path, python(), *arguments, "-v")
    assert all(words in loud for words in SAID)


def test_a_model_without_its_fast_kernels_runs_in_silence(tmp_path: Path) -> None:
    folder = checkpoint("mamba", tmp_path / "mamba")
    arguments = ("-m", "genctl", "run", "-m", str(folder), "-n", "3", "the cat")
    assert err_of(tmp_path, [sys.executable], *arguments) == b""

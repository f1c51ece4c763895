"""llama.cpp by its own `llama-bench`: one sequence at a time, greedy search, no drafts.

It times a prompt and the steps after it, and says what it was built from. It writes no tokens that could be compared.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from .work import Ran, Setup, Unavailable, Work

PROGRAM = "llama-bench"


def version(programs: Path) -> str:
    """What `llama-bench --version` says of its build. Raises Unavailable where the program is not there."""
    try:
        done = subprocess.run([programs / PROGRAM, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"{programs / PROGRAM} does not run: {error}") from None
    said = done.stdout + done.stderr
    found = re.search(r"version: (.+)", said)
    return found[1].strip() if found else "of an unknown version"


class LlamaBench:
    """One GGUF file. Each work is a run of the program, which loads the file and warms up before its clock begins."""

    def __init__(self, setup: Setup) -> None:
        if setup.programs is None:
            raise Unavailable("no folder with its programs was named")
        if setup.encoder_decoder:
            raise Unavailable("the checkpoint is not written in llama.cpp's form")
        version(setup.programs)
        self.program, self.threads = setup.programs / PROGRAM, setup.threads
        self.layers = 999 if setup.device.startswith("cuda") else 0
        self.file = next(iter(setup.folders.values())) / "model.gguf"

    def run(self, work: Work) -> Ran:
        """The seconds of all prompts, one after another. Raises Unavailable for all but single greedy rows."""
        if any(set(ask.knobs) - {"draft"} for ask in work.asks):
            raise Unavailable("llama.cpp is compared with greedy search only")
        if work.width > 1:
            raise Unavailable(f"{PROGRAM} runs one row at a time")
        lengths = {(len(ask.prompt), ask.new) for ask in work.asks}
        seconds = {pair: self._timed(*pair) for pair in lengths}
        all_seconds = [seconds[len(ask.prompt), ask.new] for ask in work.asks]
        firsts = sum(first for first, _ in all_seconds)
        return Ran((), firsts + sum(rest for _, rest in all_seconds), firsts)

    def _timed(self, prompt: int, new: int) -> tuple[float, float]:
        """Seconds of a prompt to its first token, and of the tokens after it."""
        words = ["-m", self.file, "-p", prompt, "-n", new - 1, "-t", self.threads, "-ngl", self.layers]
        command = [self.program, *map(str, words), "-r", "1", "-o", "json"]
        # it places its threads itself, on the CPUs of this process
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise RuntimeError(f"{PROGRAM} ended with {done.returncode}: {done.stderr.strip()[-200:]}")
        tests: list[dict[str, Any]] = json.loads(done.stdout)
        took = {test["n_gen"] > 0: test["avg_ns"] / 1e9 for test in tests}
        return took[False], took.get(True, 0.0)

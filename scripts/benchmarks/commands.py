"""Whole commands as sides: `genctl run`, and the script that a person would write in its place."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .sides import GENCTL, GENERATE
from .work import Ran, Unavailable, Work, checked

PLAIN = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, new, beams, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer(prompt, return_tensors="pt")
made = model.generate(**inputs, max_new_tokens=int(new), num_beams=int(beams), do_sample=False)
print(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :]), flush=True)
"""
BUILTIN = "builtin:stories"
_STORY = "Once upon a time"


class Command:
    """A process for each work: one prompt, greedy or beam search. Both read its text with the checkpoint's tokenizer.

    `folder` None is the checkpoint that genctl brings. `beside`: other processes that keep a core busy meanwhile, in
    which case each side chooses its number of threads itself.
    """

    def __init__(self, name: str, folder: Path | None, device: str = "cpu", *, beside: int = 0) -> None:
        if name not in (GENCTL, GENERATE):
            raise Unavailable("it has no such command")
        if name == GENERATE and device != "cpu":
            raise Unavailable("the plain script runs on the CPU")
        self.ours, self.folder, self.device, self.beside = name == GENCTL, folder, device, beside

    def run(self, work: Work) -> Ran:
        """Run it; the clock starts with the process. Raises RuntimeError if it fails."""
        (ask,) = work.asks
        text = _STORY if self.folder is None else " ".join(f"w{token}" for token in ask.prompt)
        if self.ours:
            model = BUILTIN if self.folder is None else str(self.folder)
            options = ["-m", model, "-n", str(ask.new), "--num-beams", str(ask.beams), "--device", self.device]
            command = [sys.executable, "-m", "genctl", "run", "--no-draft", *options, text]
        else:
            command = [sys.executable, "-c", PLAIN, str(self.folder or builtin()), str(ask.new), str(ask.beams), text]
        with competing(self.beside):
            output, ran = _timed(command, free=self.beside > 0)
        if self.folder is None:  # words of a story, whose tokens nobody counts
            return ran
        tokens = tuple(int(word[1:]) for word in output.split())
        return checked(work, Ran((tokens,), ran.seconds, ran.first_s))


def builtin() -> Path:
    """Where the checkpoint that genctl brings lies."""
    import genctl

    return Path(genctl.__file__).parent / "models" / "builtin" / BUILTIN.partition(":")[2]


@contextmanager
def competing(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that keep a core busy each, on the CPUs of this one."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _timed(command: Sequence[str], *, free: bool = False) -> tuple[str, Ran]:
    """What a command prints, and the seconds until its first byte and until its end. `free`: no variable of `host`
    says how many threads it has.
    """
    fixed = ("OMP_", "MKL_") if free else ()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(fixed)}
    began = time.perf_counter()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=variables) as process,
    ):
        assert process.stdout is not None
        first = process.stdout.read(1)
        first_s = time.perf_counter() - began
        rest = process.stdout.read()
        status = process.wait()
        seconds = time.perf_counter() - began
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    if not first or status:
        last = lines[-1] if lines else ""
        raise RuntimeError(f"{' '.join(command[1:4])[:60]} … ended with {status}: {last}")
    return (first + rest).decode(), Ran((), seconds, first_s)

"""The sides by name, in the order of the table, and a process of its own for each: they share nothing but the machine.

Every process is started with the same environment and begins by setting its affinity to the same CPUs, whatever it
inherits: threads are as many and as pinned for all.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from . import gguf_files, host
from .checkpoints import installed
from .work import Ran, Setup, Side, Unavailable, Work

GENCTL, GENERATE, CONTINUOUS = "genctl", "generate()", "generate_batch()"
CTRANSLATE2, LLAMA = "CTranslate2", "llama.cpp"
UNDRAFTED = "genctl without drafts"
# name -> the module that must be installed, the forms of a checkpoint that it reads
SIDES: dict[str, tuple[str, tuple[str, ...]]] = {
    GENCTL: ("genctl", ("transformers",)),
    GENERATE: ("transformers", ("transformers",)),
    CTRANSLATE2: ("ctranslate2", ("ctranslate2",)),
    LLAMA: ("gguf", tuple(gguf_files.FORMS)),  # which writes its files
    CONTINUOUS: ("transformers", ("transformers",)),
    UNDRAFTED: ("genctl", ("transformers",)),
}


def forms(name: str, dtype: str) -> tuple[str, ...]:
    """The forms of a checkpoint that a side reads for a type."""
    if name == LLAMA or (name in (GENCTL, UNDRAFTED) and dtype in gguf_files.TYPES):
        return (gguf_files.form(dtype),)
    return SIDES[name][1]


def missing() -> list[str]:
    """Sides whose library is not installed."""
    return [name for name, (module, _) in SIDES.items() if not installed(module)]


def make(name: str, setup: Setup) -> Side:
    """Load a checkpoint with a side. Raises Unavailable where it cannot."""
    if name in (GENCTL, UNDRAFTED):
        from .genctl_side import Genctl, Undrafted

        return Genctl(setup) if name == GENCTL else Undrafted(setup)
    if name in (GENERATE, CONTINUOUS):
        from .generate_side import Continuous, Generate

        return Generate(setup) if name == GENERATE else Continuous(setup)
    if name == CTRANSLATE2:
        from .ctranslate2_side import CTranslate2

        return CTranslate2(setup)
    from .llama_side import LlamaBench

    return LlamaBench(setup)


class Process:
    """A side in a fresh process. Raises as the side does, and RuntimeError where it fails or its process dies."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name, setup), daemon=True)
        self.process.start()
        theirs.close()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def run(self, work: Work, limit: float | None = None) -> Ran:
        """Do the work over there. Beyond `limit` seconds the process is ended: Unavailable."""
        self.pipe.send(work)
        if limit is not None and not self.pipe.poll(limit):
            self.process.kill()
            self.process.join()
            raise Unavailable(f"took more than {limit:g} s to warm up")
        ran: Ran = self._answer()
        return ran

    def peak(self) -> int:
        """Most bytes that the process has had in memory (VmHWM)."""
        found: int = self._ask("peak")
        return found

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()

    def _ask(self, what: Any) -> Any:
        self.pipe.send(what)
        return self._answer()

    def _answer(self) -> Any:
        try:
            kind, value = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"its process ended with status {self.process.exitcode}") from None
        if kind == "unavailable":
            raise Unavailable(value)
        if kind == "error":
            raise RuntimeError(value)
        return value


class Fresh:
    """A side that starts anew for each work, and says how much memory its process took."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name, self.setup = name, setup

    def run(self, work: Work) -> Ran:
        """Load, do the work, and end."""
        process = Process(self.name, self.setup)
        try:
            return replace(process.run(work), peak=process.peak())
        finally:
            process.close()


def _serve(pipe: Connection, name: str, setup: Setup) -> None:
    answers: Mapping[str, Callable[[], Any]] = {"peak": peak}
    host.pin(setup.cores)
    try:
        side = make(name, setup)
        pipe.send(("made", None))
    except Unavailable as error:
        pipe.send(("unavailable", str(error)))
        return
    except Exception:
        pipe.send(("error", traceback.format_exc()))
        return
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("made", answers[what]() if isinstance(what, str) else side.run(what)))
        except Unavailable as error:
            pipe.send(("unavailable", str(error)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))


def peak() -> int:
    """Most bytes that this process has had in memory (VmHWM). Raises Unavailable where /proc does not say."""
    try:
        with Path("/proc/self/status").open() as lines:
            for line in lines:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    raise Unavailable("peak memory is read from /proc, which is not here")

"""`genctl run` as one of several processes: rank 0 reads and writes, the others compute the same beside it.

Every rank runs the whole loop. What could differ between them comes from rank 0: rows, seeds, the number of rows at
once, the clock, and whether to stop.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from genctl.batch.rows import BadRow, InputRow
from genctl.cli.interrupt import ENDING, Interrupt
from genctl.cli.run_job import RunJob
from genctl.cli.run_options import RunOptions
from genctl.errors import UsageError
from genctl.ranks import launcher
from genctl.ranks.launch import Launch, launch_of

ALONE = ("resume", "check_batch", "check_runtime")  # options that read what one process has


class AgreedInterrupt(Interrupt):
    """Rank 0's interrupt as all ranks know it: its status changes where they ask for it together."""

    def __init__(self, own: Interrupt) -> None:
        super().__init__()
        self.own = own

    def __call__(self) -> str:
        """The reason for every live row to end now. Every rank calls this at the same step."""
        from genctl.ranks import group

        self.status = group.heard(self.own.status)
        return super().__call__()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Hold while the main thread writes or draws."""
        with self.own.busy():
            yield

    @contextmanager
    def rescued_by(self, rescue: Callable[[], object]) -> Iterator[None]:
        """While decoding: if the model does not return after a signal, another thread calls `rescue`."""
        with self.own.rescued_by(rescue):
            yield


class RanksRun(RunJob):
    """One run of a generating command by several processes, of which rank 0 reads and writes."""

    shares_ranks = True
    flag = ""  # the option that shares the work

    def __init__(self, options: RunOptions, interrupt: Interrupt) -> None:
        launch = launch_of()
        assert launch is not None
        self.launch: Launch = launch
        launcher.watch(launch.rank)
        if launch.rank:
            unwritten: dict[str, Any] = {"output": None, "events": None, "report": None, "svg": None}
            options = dataclasses.replace(options, **unwritten, quiet=True, verbose=False)
        super().__init__(options, interrupt)

    def prepare(self) -> int | None:
        """Settings without those of the checkpoint. Raises UsageError for what several processes cannot do."""
        status = super().prepare()
        for name in ALONE:
            if getattr(self.options, name):
                raise UsageError(f"{self.flag} and --{name.replace('_', '-')}: only one process can do that")
        return status

    def meet(self, stack: ExitStack) -> bool:
        """Meet the other ranks; rank 0 opens the input. Returns whether there is one."""
        from genctl.ranks import group

        group.start()
        stack.callback(group.stop)
        if self.launch.rank:
            silence(stack)
        found = super().read(stack) if not self.launch.rank else False
        found, self.lone = group.heard((found, self.lone), wait=True)
        if self.launch.rank or not found:
            self.input = iter(())
        return bool(found)

    def from_rank_0(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on rank 0, on every rank. It is not called on the others."""
        from genctl.ranks import group

        if self.options.arguments or self.options.input not in (None, "-"):  # rank 0 never waits
            return group.heard(None if self.launch.rank else make())
        return group.awaited(make)


class SharedRun(RanksRun):
    """One run in which all ranks compute the same."""

    flag = "--tensor-parallel"

    def read(self, stack: ExitStack) -> bool:
        """Meet the other ranks; rank 0's rows are those of all."""
        found = self.meet(stack)
        self.input = self._shared(iter(self.input))
        agreed = AgreedInterrupt(self.interrupt)
        self.interrupt = agreed
        return found

    def load(self) -> None:
        """Load this rank's part of the checkpoint, and agree on what ranks would choose by themselves."""
        from genctl.ranks import group

        super().load()
        if (form := self.base.generation.cache_implementation) not in ("dynamic", "off"):
            raise UsageError(f"--tensor-parallel and --cache {form}: the cache is shared out as well, and grows")
        self.session.clock = lambda: float(group.heard(time.perf_counter()))
        self.width, self.span, self.seed, self.live = group.heard((self.width, self.span, self.seed, self.live))

    def _shared(self, rows: Iterator[InputRow | BadRow]) -> Iterator[InputRow | BadRow]:
        """Rank 0's rows, on every rank."""

        while (row := self.from_rank_0(lambda: next(rows, None))) is not None:
            yield row


def silence(stack: ExitStack) -> None:
    """Of a rank that writes nothing: its streams lead nowhere, and signals are left to rank 0."""
    nowhere: Any = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 — the stack closes it
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = nowhere

    def again() -> None:
        sys.stdout, sys.stderr = before

    stack.callback(again)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)

"""`--check-runtime` and `--check-batch`: what a run decodes is compared with other ways to decode it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from genctl import events
from genctl.commands.run.options import RunOptions
from genctl.engines.protocol import Engine, Flow
from genctl.engines.requests import Report, Request, Skipped, grouped
from genctl.errors import CheckError
from genctl.plural import count

if TYPE_CHECKING:
    from genctl.commands.run.batch_divergence import BatchDivergence
    from genctl.engines.local.session import Session


class RunChecks:
    """The checks of one run. `say` prints what they find."""

    def __init__(self, options: RunOptions, say: Callable[[str], object]) -> None:
        self.options, self.say = options, say
        self._different = 0  # sequences that depend on their batch
        self._compared = False  # the first prompt went through both runtimes
        self._runtime_difference = ""  # what that found, if the runtimes are far apart

    def stream(
        self, engine: Engine, requests: Iterator[Request | Skipped | None], report: Report, flow: Flow
    ) -> Generator[events.Event, None, None]:
        """As `Engine.stream`; with --check-batch the prompts of each group are then decoded alone."""
        from genctl.commands.run.batch_divergence import checked
        from genctl.engines.local.session import Session

        assert isinstance(engine, Session)  # both checks look into a checkpoint that was loaded here
        if self.options.check_runtime:
            requests = self._with_both_runtimes(engine, requests)
        if not self.options.check_batch:
            yield from engine.stream(requests, report, flow)
            return
        for group in grouped(requests, flow.span or 1):
            yield from checked(
                engine, group, report, width=flow.width, told=self._differs, interrupted=flow.interrupted
            )

    def verdict(self) -> None:
        """Raises CheckError where a check failed."""
        if self._runtime_difference:
            raise CheckError(f"--check-runtime: {self._runtime_difference}")
        if self._different:
            differ = count(self._different, "sequence differs", "sequences differ")
            raise CheckError(f"--check-batch: {differ} from what is decoded alone")

    def _with_both_runtimes(
        self, session: Session, requests: Iterator[Request | Skipped | None]
    ) -> Iterator[Request | Skipped | None]:
        """The same requests; the first prompt goes through both runtimes before it is decoded."""
        from genctl.commands.run.runtime_check import compare

        for request in requests:
            if isinstance(request, Request) and not self._compared:
                self._compared = True
                comparison = compare(session, request)
                self.say(f"check: {comparison}")
                self._runtime_difference = "" if comparison.close else str(comparison)
            yield request

    def _differs(self, comparison: BatchDivergence) -> None:
        self._different += 1
        self.say(f"check: {comparison}")
